# make study        set up .venv, then run the main job on built-in data and write its page
# make test         set up .venv, then run the tests that every change must pass; minutes
# make test-all     the same and the slow ones: everything that needs no extra package
# make test-extras  what needs a browser, other packages or a fresh environment, and the long fault tests
# make check        lint, format, types, then `make test`
# make mutants      plant faults one by one and report which tests catch them
# make native       compile the native kernels again if their sources have changed; `make test` does it too
# make site         write the documentation site to build/site
# make docs         write the generated parts of docs/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := $(VENV)/.extras
UNFINISHED := $(VENV)/.unfinished
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# One thread for each of the two workers: the two levels of parallelism would only fight for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: study test test-all test-extras lint check mutants docs site native

# A compiler that fails is no reason not to run a study, hence the minus sign.
study: $(READY)
	-$(BIN)/python hatch_build.py
	$(BIN)/manymax study

test: native
	$(PYTEST) -m "not slow and not extras and not realdata"

test-all: test
	$(PYTEST) -m "slow and not extras and not realdata"

test-extras: $(EXTRAS) native
	$(PYTEST) -m "extras and not realdata"

# Nothing happens if they are up to date, or if there is no compiler: everything works without them.
native: $(READY)
	$(BIN)/python hatch_build.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

mutants: $(READY)
	$(BIN)/python tests/mutants/plant.py

site: $(READY)
	$(INSTALL) -e '.[site]'
	$(BIN)/mkdocs build

docs: native
	$(BIN)/manymax docs
	$(BIN)/manymax reproduction

# torch goes in first and alone: its pin is then settled before anything else can ask for another build.
# A set-up that was interrupted leaves its mark behind and is done again from nothing.
$(READY): pyproject.toml constraints.txt
	if [ -e $(UNFINISHED) ]; then rm -rf $(VENV); fi
	mkdir -p $(VENV) && touch $(UNFINISHED)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e '.[study,dev]'
	rm $(UNFINISHED) && touch $@

# Packages that only the extras tier needs. Where one of them cannot be installed its tests are skipped, and say so.
$(EXTRAS): $(READY)
	$(INSTALL) -e '.[track]' || echo "some packages of the extras could not be installed: their tests will be skipped"
	$(INSTALL) --no-deps napkinxc || echo "napkinxc could not be installed: its test will be skipped"
	$(INSTALL) --no-deps triton || echo "triton could not be installed: the tests of its kernels will be skipped"
	$(INSTALL) -e '.[site]' || echo "the site could not be installed: its tests will be skipped"
	$(INSTALL) -e '.[peers]' || echo "some packages of the extras could not be installed: their tests will be skipped"
	$(INSTALL) -e '.[huggingface]' || echo "transformers could not be installed: its tests will be skipped"
	$(INSTALL) -e '.[sentences]' || echo "datasets could not be installed: tests of sentence-transformers will be skipped"
	$(INSTALL) -e '.[lightning]' || echo "lightning could not be installed: its tests will be skipped"
	$(INSTALL) --no-deps RecTools typeguard || echo "RecTools could not be installed: its tests will be skipped"
	touch $@
