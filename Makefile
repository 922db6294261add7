# make study   set up .venv, then run the main job
# make test    set up .venv, then run every test that needs no outside data
# make check   lint, format, types, tests, doctests
# make docs    write the generated parts of README.md and docs/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UNFINISHED := $(VENV)/.unfinished
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: study test check docs

study: $(READY)
	$(BIN)/manymax study

# One thread for each of the workers: the two levels of parallelism would only fight.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not realdata"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

docs: $(READY)
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
