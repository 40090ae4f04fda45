#!/bin/sh
# wheelhouse.sh PYTHON: downloads wheels into build/wheelhouse. The benchmarks need them on a machine that has JAX and
# torch but no network. The wheels are those of the packages in wheelhouse.txt, in the versions of constraints.txt, for
# Linux on x86-64. Set WHEEL_PYTHON to the Python version of that machine. The default is 3.12.
set -eu
python=$1 version=${WHEEL_PYTHON:-3.12}
out=build/wheelhouse here=$(dirname "$0")
rm -rf "$out"
mkdir -p "$out"
platforms=$(for glibc in 2_17 2_27 2_28 2_31 2_34 2_35; do printf -- '--platform manylinux_%s_x86_64 ' "$glibc"; done)
# Select the pins for WHEEL_PYTHON here, because pip would evaluate their markers with the version of $python.
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
fetch wheel --wheel-dir "$out" promise # published only as source; it is pure Python
rm "$out/.names" "$out/.pins"
size=$(du -sm "$out" | cut -f1)
echo "$out: $(ls "$out" | wc -l) wheels for Python $version, $size MiB"
[ "$size" -le 60 ] || { echo "error: $out may have at most 60 MiB; remove large packages from $here/wheelhouse.txt" >&2; exit 1; }
