# The Inference Wall. `make` alone says what there is. Every target does its own set-up.

PORT ?= 8899
RIG ?= auto
SCALE ?= 1
AGAIN ?=
WALL := .venv/bin/wall

.DEFAULT_GOAL := help
.PHONY: help book site serve test engine lock clean distclean

help:
	@echo 'make book       measure all five parts on this machine and render the site (two cores: half an hour)'
	@echo '                RIG=cpu|gpu|...  which machine profile; default: auto'
	@echo '                SCALE=0.2  a fifth of the requests: a quick look, not evidence'
	@echo '                AGAIN=1    measure anew what is already measured'
	@echo 'make engine     set up all that measuring needs, and measure nothing (then: .venv/bin/wall run all --plan)'
	@echo 'make site       render the site from the records that are there; starts no engine'
	@echo 'make serve      show the site at http://127.0.0.1:$(PORT) (PORT=... for another)'
	@echo 'make test       run every test, in a browser too'
	@echo 'make clean      remove what was rendered; records stay'
	@echo 'make distclean  also remove the environment, .venv'
	@echo 'make lock       choose the versions of all packages anew (for maintainers)'
	@echo
	@echo '.venv/bin/wall --help shows the commands behind these; .venv/bin/wall doctor examines this machine.'

book:
	@tools/setup.sh engine
	@$(WALL) run all --rig $(RIG) --scale $(SCALE) $(if $(AGAIN),--again)
	@$(WALL) site
	@echo 'The site is in _build/html. To look at it: make serve'

engine:
	@tools/setup.sh engine

site:
	@tools/setup.sh site
	@$(WALL) site
	@echo 'The site is in _build/html. To look at it: make serve'

serve:
	@tools/serve.sh $(PORT)

test:
	@tools/setup.sh browser
	@.venv/bin/python -m pytest

lock:
	@tools/setup.sh site
	@.venv/bin/python tools/lock.py

clean:
	rm -rf _build build jupyter_execute .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean
	rm -rf .venv *.egg-info packages/*/build packages/*/*.egg-info
