#!/bin/sh
# wheelhouse.sh: gathers in build/wheelhouse what the benchmarks need on a machine without a network that has JAX and torch:
# the wheels of wheelhouse.txt, as pinned in constraints.txt, for Linux on x86-64. WHEEL_PYTHON=3.12 is that machine's Python.
set -eu
python=$1 version=${WHEEL_PYTHON:-3.12}
out=build/wheelhouse here=$(dirname "$0")
rm -rf "$out"
mkdir -p "$out"
platforms=$(for glibc in 2_17 2_27 2_28 2_31 2_34 2_35; do printf -- '--platform manylinux_%s_x86_64 ' "$glibc"; done)
# Those of that Python: pip would read the markers by this one's version.
"$python" -c '
import sys
from pip._vendor.packaging.requirements import Requirement
lines = [line.partition("#")[0] for line in open("constraints.txt")]
for pin in map(Requirement, filter(str.strip, lines)):
    if pin.marker is None or pin.marker.evaluate({"python_version": sys.argv[1]}):
        print(f"{pin.name}{pin.specifier}")' "$version" > "$out/.pins"
fetch() { "$python" -m pip "$@" --quiet --disable-pip-version-check --no-deps --constraint "$out/.pins"; }
grep -v '^promise$' "$here/wheelhouse.txt" > "$out/.names"
# shellcheck disable=SC2086
fetch download --only-binary=:all: --python-version "$version" --implementation cp $platforms \
  --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$out" --requirement "$out/.names"
fetch wheel --wheel-dir "$out" promise # Python alone, and published as source only
rm "$out/.names" "$out/.pins"
size=$(du -sm "$out" | cut -f1)
echo "$out: $(ls "$out" | wc -l) wheels for Python $version, $size MiB"
[ "$size" -le 60 ] || { echo "error: it may have 60 MiB; take what is large out of $here/wheelhouse.txt" >&2; exit 1; }
