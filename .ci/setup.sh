#!/bin/sh
# setup.sh DIR default|newest [pins]: makes an environment in DIR, with the default or the newest Python. It installs
# jaxmp (editable) and the packages of the experiments and the tests, in the versions of constraints.txt. With
# "newest", it also installs the CUDA plugin that compiles for an absent GPU, if wheels exist for this machine. With
# "pins", it ignores constraints.txt and installs the newest versions. PYTHON=... names the default Python.
set -eu
dir=$1 which=$2 pins=${3:-}
pythons=$("$(dirname "$0")/pythons.sh" "${PYTHON:-}")
if [ -z "$pythons" ]; then
  echo "jaxmp needs Python 3.11 to 3.14 with the modules venv and ensurepip${PYTHON:+, and $PYTHON is not one}." >&2
  echo "Install one (on Debian or Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3.12" >&2
  exit 1
fi
if [ "$which" = default ]; then line=$(echo "$pythons" | head -n 1); else line=$(echo "$pythons" | tail -n 1); fi
version=${line%% *} python=${line#* }
start=$(date +%s)
echo "Setting up $dir (Python $version): this takes one or two minutes and 1.5 to 2.2 GB on disk"
[ "$("$dir/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ] ||
  "$python" -m venv --clear "$dir"
install() {
  # Python compiles a module when it is first imported. pip would compile all modules, which takes a minute longer.
  "$dir/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check ${pins:+--upgrade --upgrade-strategy=eager} \
    --editable "$1" $([ -n "$pins" ] || echo --constraint constraints.txt)
}
install ".[test${pins:+,docs}]"
if [ "$which" = newest ]; then
  install ".[compile-only]" || echo "JAX's CUDA plugin cannot be installed on this machine: the tests that compile for a GPU will be skipped"
fi
touch "$dir/installed"
echo "$dir is ready after $(($(date +%s) - start)) s"
