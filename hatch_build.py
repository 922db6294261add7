"""Compile the native libraries: as a build hook of hatchling, and as a command in a checkout.

    python hatch_build.py            compile what is out of date, into src/manymax/engine/native_libraries
    python hatch_build.py --force    compile everything

One shared library per level of src/manymax/engine/native_levels.py, which has the flags and the reasons for them. No
torch and no header of Python is needed. Without a compiler that works, the package is pure Python, and a line says so.

Environment: CXX names the compiler. MANYMAX_BUILD=native makes it an error if the libraries cannot be compiled, and
MANYMAX_BUILD=python leaves them out.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a command, in an environment that builds nothing
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("src") / "manymax"
# g++ first: torch comes with the OpenMP library of gcc, and code of clang needs another one beside it.
COMPILERS = ("g++", "c++", "clang++")
VARIABLE = "MANYMAX_BUILD"
WAYS = ("", "native", "python")  # its values
# The hash of all sources is compiled into this file alone: the objects of the others stay what they are.
STAMPED = "library.cpp"


class CannotCompileError(Exception):
    """The libraries cannot be compiled; the message is a sentence for the user."""


class NoCompilerError(CannotCompileError):
    """There is nothing to compile them with, or nothing to compile them for: no fault of the sources."""


class CustomBuildHook(BuildHookInterface):
    """Compiles the libraries before a wheel is packed or an editable install is made, and names the wheel for them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        libraries = build(Path(self.root))
        if not libraries:
            return
        build_data["artifacts"] += [f"/{path.relative_to(self.root).as_posix()}" for path in libraries]
        # Not for one version of Python: nothing of Python is in a library. For one platform.
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["pure_python"] = False


def build(root: Path, force: bool = False, strict: bool = False) -> list[Path]:
    """Compile what is out of date; the paths of all libraries, or none, with a printed reason, where that fails.

    Args:
        root: the folder of the project.
        force: compile everything.
        strict: raise SystemExit where a compiler is there and fails, for those who work on the sources.
    """
    way = os.environ.get(VARIABLE, "")
    if way not in WAYS:
        raise SystemExit(f"${VARIABLE} must be one of {', '.join(map(repr, WAYS))}; got {way!r}.")
    folder = root / PACKAGE / _levels(root).FOLDER
    try:
        if way == "python":
            raise NoCompilerError(f"${VARIABLE} says so.")
        return _compile(root, folder, force)
    except CannotCompileError as error:
        if way == "native" or (strict and not isinstance(error, NoCompilerError)):
            raise SystemExit(f"the native kernels of manymax cannot be compiled: {error}") from None
        # What an older build has left in the folder is not packed, and is not loaded if it is out of date.
        print(
            f"manymax is built without its native kernels: {error} It works without them; sparse losses are then "
            f"slower. {VARIABLE}=native makes this an error.",
            file=sys.stderr,
        )
        return []


def platform_tag() -> str:
    """The platform part of a wheel's name: linux_x86_64, or macosx_11_0_arm64."""
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    # A Python for both kinds of Mac; the library is for the one that the compiler makes code for.
    return "macosx_11_0_arm64" if tag.startswith("macosx") and tag.endswith(("universal2", "arm64")) else tag


def _levels(root: Path) -> ModuleType:
    """native_levels.py by its path: importing it as a part of the package would import torch."""
    spec = spec_from_file_location("native_levels", root / PACKAGE / "engine" / "native_levels.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(root: Path, folder: Path, force: bool) -> list[Path]:
    levels = _levels(root)
    compiler = _compiler()
    machine = levels.architecture(_run([*compiler, "-dumpmachine"]).partition("-")[0])
    wanted = levels.levels_of(machine)
    # Python and compiler may differ on a machine that runs programs of two kinds.
    if not wanted or machine not in levels.architecture(platform_tag().replace("arm64", "aarch64")):
        raise NoCompilerError(f"there is no native code for {platform_tag()} by a compiler for {machine}.")
    stamp = levels.fingerprint(root / PACKAGE)
    paths = [folder / level.file for level in wanted]
    if not force and all(path.exists() and stamp.encode() in path.read_bytes() for path in paths):
        return paths
    # Objects are kept from one build to the next under names that say what they were made from.
    objects = root / "build" / "native"
    objects.mkdir(parents=True, exist_ok=True)
    gcc = "clang" not in _run([*compiler, "--version"]).lower()
    common = [*compiler, *levels.FLAGS, *(levels.GCC_FLAGS if gcc else ())]
    # Templates of the standard library are visible however they are compiled: those of this level are bound to it.
    link = ["-Wl,-Bsymbolic"]
    if sys.platform == "darwin":
        # Apple's compiler knows OpenMP, but not by its usual flag; and its linker wants to hear that names which are
        # missing are found when the library is loaded.
        common = [part for flag in common for part in (("-Xclang", flag) if flag == "-fopenmp" else (flag,))]
        common += ["-arch", "arm64", "-mmacosx-version-min=11.0"]
        link = ["-undefined", "dynamic_lookup", "-arch", "arm64", "-mmacosx-version-min=11.0"]
    print(f"compiling the native kernels for {', '.join(level.name for level in wanted)}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    common += [f"-I{root / PACKAGE / 'engine'}"]
    files = levels.sources(root / PACKAGE)
    headers = [path for path in files if path.suffix == ".h"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = [
            [
                pool.submit(_object, [*common, *level.flags], path, stamp, objects, headers)
                for path in files
                if path not in headers
            ]
            for level in wanted
        ]
        made = [[job.result() for job in jobs] for jobs in pending]
    for parts, path in zip(made, paths, strict=True):
        # -fopenmp is not among these flags, so that no OpenMP library is linked; native_library.py says why.
        _write([*compiler, "-shared", *link, *map(str, parts)], path)
    for old in {*objects.iterdir()} - {part for parts in made for part in parts}:
        old.unlink(missing_ok=True)
    return paths


def _compiler() -> list[str]:
    # $CXX first, as build tools do: whoever sets it wants that one and no other. It may have arguments.
    if given := os.environ.get("CXX"):
        return shlex.split(given)
    if sys.platform not in ("linux", "darwin"):
        raise NoCompilerError(f"it has not been tried on {sys.platform}.")
    if found := next(filter(None, map(shutil.which, COMPILERS)), None):
        return [found]
    raise NoCompilerError("no C++ compiler was found. Install one (g++ or clang++), or name it in $CXX.")


def _object(command: list[str], source: Path, stamp: str, folder: Path, headers: list[Path]) -> Path:
    """Compile one file, unless that has been done."""
    command = [*command, *([f'-DMANYMAX_SOURCES="{stamp}"'] if source.name == STAMPED else []), "-c"]
    # Any header may be included.
    texts = [path.read_bytes() for path in (source, *headers)]
    name = hashlib.sha256(b"\0".join([repr(command).encode(), str(source).encode(), *texts])).hexdigest()[:24]
    path = folder / f"{source.parent.name}-{source.stem}-{name}.o"
    if not path.exists():
        _write([*command, str(source)], path)
    return path


def _write(command: list[str], path: Path) -> None:
    """Run a compiler into a file of its own, and rename that when it is complete.

    A rename is atomic, so that no process loads half a library; and one that is in use keeps the file it has opened.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        _run([*command, "-o", str(new)])
        new.replace(path)


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise CannotCompileError(f"{command[0]} does not work: {error}.") from None
    except subprocess.CalledProcessError as error:
        raise CannotCompileError(f"{command[0]} failed:\n{error.stderr[-3000:]}\n") from None


if __name__ == "__main__":
    build(ROOT, force="--force" in sys.argv[1:], strict=True)
