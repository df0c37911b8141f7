#!/usr/bin/env bash
# Prints the folder that cargo builds into.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "${CARGO_TARGET_DIR:-$PWD/target}"
