#!/usr/bin/env bash
# The supported Pythons that are here, newest first, one a line: on PATH, or pyenv's.
set -euo pipefail
for version in 3.13 3.12 3.11 3.10; do
  for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
    if "$candidate" -c 'import sys, venv' 2>/dev/null; then
      echo "$candidate"
      break
    fi
  done
done
