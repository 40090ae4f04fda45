#!/bin/sh
# dist.sh PYTHON: builds the sdist and the wheel in dist/. Then it installs only the wheel into an empty environment.
# There it runs the first program of docs/first_model.md and `jaxmp doctor`, from a folder that is not the root of the
# repository.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
rm -rf dist build/dist
mkdir -p build/dist
"$1" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "build>=1.2"
"$1" -m build --outdir dist .
"$1" -m venv build/dist/venv
build/dist/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
sed -n '/^    ```python$/,/^    ```$/p; /^    ```$/q' docs/first_model.md | sed '1d; $d; s/^    //' > build/dist/example.py
cd build/dist
venv/bin/python example.py
venv/bin/jaxmp doctor
echo "dist/ has:" && ls "$root/dist"
