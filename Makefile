# The host's front; `make` alone lists it. Needs make and Python 3.10, and finds or brings up the rest.
PYTHON ?= python3
export TORCH # make build TORCH=2.7.0: another folder of locks
.DEFAULT_GOAL := help
.PHONY: help jupyter ssh shell train multinode check test test-scale bench soak build release-image lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

jupyter: ## JupyterLab in the browser; finds out by itself whether there is a GPU
	@$(PYTHON) -m host.up jupyter

ssh: ## a shell: starts sshd on port 2222 and shows how to log in
	@$(PYTHON) -m host.up ssh

shell: ## a shell as dev in the service that runs; another: make shell IN=ssh
	@docker compose exec --user dev $(or $(IN),jupyter) bash -l

train: ## train with mixed precision; settings in ARGS="--precision bf16 …"
	@$(PYTHON) -m host.up train $(ARGS)

multinode: ## two nodes as containers, to see elastic training; settings in ARGS="--epochs 90 …"
	@$(PYTHON) -m host.multinode $(ARGS)

check: ## lint, types and the host's tests: no container, under two minutes
	@$(PYTHON) -m host.check $(ARGS)

test: ## prove the whole project on this machine; brings up a Docker engine if there is none
	@$(PYTHON) -m host.test $(ARGS)

bench: ## measure sizes per layer, start, stop and training times (the tables of docs/measurements.md)
	@$(PYTHON) -m benchmarks.image && $(PYTHON) -m benchmarks.modes && $(PYTHON) -m benchmarks.training

test-scale: ## train on real clusters made of containers: torchrun's nodes, Slurm, Kubernetes' pods
	@$(PYTHON) -m host.test tests/scale $(ARGS)

soak: ## the long run: kills, logins and kernels for MINUTES (10), and what grew meanwhile
	@$(PYTHON) -m benchmarks.soak --minutes $(or $(MINUTES),10)

build: ## build the image pytorch-cuda:v2.6
	@$(PYTHON) -m host.build $(ARGS)

release-image: ## what is given away: an OCI layout with small layers, and the tag of this version
	@$(PYTHON) -m host.release_image $(ARGS)

lock: ## make the hash locks in requirements/ anew
	@requirements/lock

clean: ## remove what the tests made: their virtual environment and test image
	rm -rf .build
	-docker image rm pytorch-cuda:v2.6-test
