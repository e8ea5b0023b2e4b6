# Two commands are enough on a fresh machine with Python 3.11+, git and make:
#   make train    install, train a small model on real text with four local processes, write its report
#   make test     install what tests need, run them (WORKERS=6: on more cores)

# A Python that was built without profiles, as pyenv's is unless told, is slower: then the system's, where that has what
# environments and compiled layers need.
BUILT_WITH_PROFILES := import sysconfig; raise SystemExit("--enable-optimizations" not in sysconfig.get_config_var("CONFIG_ARGS"))
WILL_DO := import ensurepip, pathlib, sys, sysconfig; \
	raise SystemExit(sys.version_info < (3, 11) or not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())
PYTHON ?= $(shell python3 -c '$(BUILT_WITH_PROFILES)' || ! /usr/bin/python3 -c '$(WILL_DO)' 2>/dev/null && echo python3 || echo /usr/bin/python3)
VENV   := .venv
BIN    := $(VENV)/bin
OLDEST := .venv-oldest
NEWEST := .venv-newest
DOCS   := .venv-docs
VERL   := .venv-verl$(if $(TRANSFORMERS),-$(TRANSFORMERS))
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# What pip says while it lasts: files of 10 MB and more, the packages' number, and errors; not each package's steps.
define pip_lines
awk '/is ignored: it is neither|^ *(Collecting|Processing|Requirement already|Looking in|Obtaining|Installing b|Checking if|Getting req|Preparing|Building|Created wheel|Stored in|Successfully|Attempting|Found existing|Uninstalling)|^ *(Downloading|Using cached).*metadata/ { next } \
	/^ *(Downloading|Using cached)/ { if (/[0-9][0-9]\.[0-9] MB|GB/) { sub(/[^ ]*\//, ""); print; fflush() } next } \
	/^Installing collected packages/ { print "  installing " NF - 3 " packages"; fflush(); next } { print; fflush() }'
endef
RUN    ?= runs/first
# Two workers leave two cores idle up to a third of the time, while ranks wait for each other.
WORKERS ?= 3
VERL_VERSION := 0.9.1
# The range in which pip finds a build without CUDA on the machines that have one; TORCH=torch takes the newest.
TORCH  ?= torch>=2.11,<2.14
VLM    ?= runs/vlm
# Every process would compile longspan anew in an environment that writes no bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train vlm docs test test-all test-gpu test-oldest test-newest test-verl test-formats predictions check format types wheel wheel-demo recipes recipes-check bench size clean help

help:
	@sed -n '1,4p' Makefile
	@echo "#   make vlm      train a small vision-language model on handwritten digits, write its report"
	@echo "#   make check    format, lint, types, import contracts, names"
	@echo "#   make format   let ruff rewrite what make check would complain of"
	@echo "#   make types    types of the wheel's public names, by pyright --verifytypes"
	@echo "#   make wheel    a wheel in dist/, with the examples; make wheel-demo: installed into an empty environment, and tried"
	@echo "#   make recipes  what examples/recipes hold on 1, 4 and 8 H100s and H200s, written next to them"
	@echo "#   make test-all the tests, and the whole tables of attention and of training (hours on two cores; TESTS=tests/model: a part)"
	@echo "#   make test-gpu the tests of tests/over_nccl.py over NCCL, one rank a GPU; goes on where it was ended (PART=attention: one part; RANKS_PER_GPU=8: ranks share a GPU)"
	@echo "#   make test-oldest the tests with the oldest torch and transformers that we support (downloads several GB)"
	@echo "#   make test-newest the tests with the newest torch, transformers and trl, on Python 3.13 (downloads several GB)"
	@echo "#   make test-verl the tests of longspan.verl, with verl $(VERL_VERSION) beside what make test installs (TRANSFORMERS=5.10.4: and that one)"
	@echo "#   make test-formats the tests of folders in 4 and 8 bits, with bitsandbytes, which writes to standard error wherever it is installed"
	@echo "#   make predictions  measured steps of bench/records beside what planners say; fails off the bar"
	@echo "#   make docs     the site of docs/ in build/site, with every link checked (needs no torch)"
	@echo "#   make size     tokens of code and lines by folder"

$(VENV)/.core: pyproject.toml
	@echo "installing longspan and what it needs into $(VENV) (about a minute, 1.3 GB on a machine without GPUs)"
	@test -L $(VENV) || { rm -f $(BIN)/python*; $(PYTHON) -m venv $(VENV); }  # an older one may link to another Python
	@$(PIP) '$(TORCH)' -e . 2>&1 | $(pip_lines)
	@$(BIN)/python -c "import longspan" && touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what tests and checks need"
	@$(PIP) '$(TORCH)' -e '.[dev,viz]' 2>&1 | $(pip_lines)
	@$(BIN)/python -c "import pytest, hypothesis" && touch $@

train: $(VENV)/.core
	$(BIN)/longspan train examples/first.toml --world 4 --device cpu --run.dir $(RUN)

$(VENV)/.vlm: $(VENV)/.core
	@echo "installing Pillow, and scikit-learn for its handwritten digits"
	@$(PIP) '$(TORCH)' -e '.[vlm]' 2>&1 | $(pip_lines)
	@$(BIN)/python -c "import PIL, sklearn" && touch $@

vlm: $(VENV)/.vlm
	$(BIN)/python examples/vlm/data.py runs/vlm-data
	PYTHONPATH=examples/vlm $(BIN)/longspan train examples/vlm.toml --world 4 --device cpu --run.dir $(VLM)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "whole or not whole" $(TESTS)

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest --backend nccl -m nccl --resume=runs/test-gpu.jsonl $(if $(PART),--part $(PART)) $(if $(RANKS_PER_GPU),--ranks-per-gpu $(RANKS_PER_GPU))

# $(1): folder, $(2): python, $(3): versions
define environment
	@echo "installing $(3) into $(1) (several GB)"
	@$(2) -m venv $(1)
	@$(1)/bin/python -m pip install --disable-pip-version-check --progress-bar off $(3) -e '.[dev,viz]' 2>&1 | $(pip_lines)
	@$(1)/bin/python -c "import pytest, hypothesis, longspan" && touch $@
endef

$(OLDEST)/.dev: pyproject.toml
	$(call environment,$(OLDEST),$(PYTHON),'torch==2.11.*' 'transformers==5.17.*')

$(NEWEST)/.dev: pyproject.toml
	$(call environment,$(NEWEST),python3.13,'torch<2.16' 'transformers<6' 'trl<2')

test-oldest: $(OLDEST)/.dev
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile

test-newest: $(NEWEST)/.dev
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadfile

test-formats: $(VENV)/.dev
	@$(PIP) 'bitsandbytes>=0.50' 2>&1 | $(pip_lines)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "whole or not whole" tests/model/frozen tests/hf/test_frozen.py tests/run/runs/test_lora_run.py::test_a_base_in_8_bits_merges_into_dequantised_weights; \
		status=$$?; $(BIN)/python -m pip uninstall -q -y bitsandbytes; exit $$status

# verl wants an older transformers, so it comes without what it depends on; the rest is that of $(VENV).
$(VERL)/.dev: $(VENV)/.dev
	@echo "installing verl $(VERL_VERSION) and what it imports into $(VERL)"
	@$(BIN)/python -m venv $(VERL)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$($(VERL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	@for what in "-e .[verl]" "--no-deps verl==$(VERL_VERSION)" $(if $(TRANSFORMERS),transformers==$(TRANSFORMERS)); do \
		$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check $$what 2>&1 \
			| { grep -v "is ignored: it is neither\|\(verl\|longspan\) .* requires\|dependency resolver" || true; }; done
	@$(VERL)/bin/python -c "import verl, longspan.verl" && touch $@

test-verl: $(VERL)/.dev
	$(VERL)/bin/python -m pytest tests/verl

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	NODE_OPTIONS=--max-semi-space-size=128 $(BIN)/pyright  # a tenth faster
	$(BIN)/lint-imports
	$(BIN)/python bench/source/house.py --check --entered

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/.core
	@rm -rf dist && $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist . && ls -l dist/*.whl

wheel-demo: wheel
	$(BIN)/python bench/source/wheel_demo.py dist/*.whl "$(DEMO)" '$(TORCH)'

types: $(VENV)/.dev wheel
	$(BIN)/python bench/source/public_types.py dist/*.whl

recipes: $(VENV)/.dev
	$(BIN)/python bench/plans/recipes.py

recipes-check: $(VENV)/.dev
	$(BIN)/python bench/plans/recipes.py --check

$(DOCS)/.made: docs/site/requirements.txt
	@echo "installing what the site needs into $(DOCS)"
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $< 2>&1 \
		| { grep -v "is ignored: it is neither a file nor a directory" || true; }
	@$(DOCS)/bin/python -c "import material, mkdocstrings" && touch $@

docs: $(DOCS)/.made
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "build/site/index.html; with search: $(DOCS)/bin/python -m http.server --directory build/site"

predictions: $(VENV)/.core
	$(BIN)/python bench/plans/predictions.py

size: $(VENV)/.core
	@$(BIN)/python bench/source/house.py

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(DOCS) .venv-verl* runs build dist
