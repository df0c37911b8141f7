# The one entry point for people and for CI. `make` alone lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PATH := $(PATH):$(HOME)/.cargo/bin

NICS ?= 8
# Of make cluster and make e2e; see e2e/cluster/README.md.
K8S ?= 1.37.2
CONTAINERD ?= released
E2E ?=
# Of make nri-reference; see e2e/nri-reference/README.md.
NRI ?=
export K8S CONTAINERD
# Of make fuzz: which targets (all), and how long each of them; see fuzz/README.md.
FUZZ ?=
FUZZ_SECONDS ?= 60
export FUZZ FUZZ_SECONDS
# Of make e2e-vm: which lines of e2e/vm/tests (all); see e2e/vm/README.md.
VM ?=
# Where `make bench` writes its figures as JSON; empty: to nowhere.
BENCH_JSON ?=
# More for `make bench`, such as "--rounds 20" or "--check".
BENCH_ARGS ?=
export BENCH_JSON

.PHONY: help setup build test demo bench lint bench-vm clean cluster cluster-shell cluster-down e2e e2e-vm fuzz nri-reference

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## install what is missing for building and testing (Debian 12, root)
	@hack/setup.sh

build: ## build the agent and its guard: target/release/dranic, dranic-guard
	@hack/setup.sh build
	@cargo build --release --locked --package dranic

test: setup ## run all tests; ends with "N passed, N failed, N skipped"
	@hack/test.sh

demo: setup ## watch pods get NICs on a scratch node (NICS=8)
	@echo "building the agent and the demo (the first time takes some minutes)"
	@cargo build --locked --bin dranic --bin dranic-guard --bin dranic-demo --workspace
	@"$$(hack/target.sh)/debug/dranic-demo" --nics $(NICS)

bench: setup ## measure a release build (BENCH_JSON=FILE keeps the figures)
	@echo "building a release of the agent and the benchmark (the first time takes some minutes)"
	@cargo build --release --locked --workspace --bin dranic --bin dranic-guard --bin dranic-bench
	@"$$(hack/target.sh)/release/dranic-bench" $(BENCH_ARGS)

cluster: ## bring a real Kubernetes of two nodes up, with the agent on it (K8S=1.37.2 CONTAINERD=released|policy|debian)
	@hack/setup.sh cluster
	@e2e/cluster/cluster.sh

cluster-shell: ## a shell on its first node, with kubectl and helm
	@e2e/cluster/shell.sh

cluster-down: ## end it; nothing of it is left
	@e2e/cluster/down.sh

e2e: ## run all scenarios on it; ends with "N passed, N failed, N skipped" (E2E="--only NAME", see README of e2e/cluster)
	@hack/setup.sh cluster
	@e2e/cluster/e2e.sh $(E2E)

fuzz: ## fuzz the parsers of hostile bytes (FUZZ_SECONDS=60 FUZZ=mux,ttrpc); ends with "N passed, N failed, N skipped"
	@hack/setup.sh fuzz
	@hack/fuzz.sh

nri-reference: ## run the runtime side of NRI itself against us; ends with "N passed, N failed, N skipped" (NRI="--only NAME", see README of e2e/nri-reference)
	@hack/setup.sh test
	@e2e/nri-reference/run.sh $(NRI)

e2e-vm: ## tests with PCI NICs, SR-IOV and RDMA in a virtual machine; ends with "N passed, N failed, N skipped" (VM=pci, see README of e2e/vm)
	@hack/setup.sh test
	@e2e/vm/e2e.sh $(VM)

bench-vm: ## measure 8 real NICs that are up, in the virtual machine: in the hook, behind the gate, and a loop beside it
	@hack/setup.sh test
	@e2e/vm/e2e.sh slow_nics
	@grep -h '^measured:' "$$(hack/target.sh)/e2e-vm/output.txt"

lint: ## check formatting, and clippy without warnings
	@hack/setup.sh build
	@cargo fmt --all -- --check
	@cargo clippy --workspace --all-targets --locked -- -D warnings

clean: ## remove what was built
	@cargo clean
