#!/bin/sh
# pythons.sh [PYTHON]: prints a line "VERSION PATH" for the default Python, and then such a line for the newest Python.
# A Python is usable if jaxmp supports it and it can make virtual environments. Others are ignored. The default is
# PYTHON if it is given, else python3 if it is usable, else the newest. If there is no usable Python, or PYTHON is
# given but not usable, nothing is printed.
# Each candidate is run, because a command on PATH can be a shim that fails.
probe='
import sys, ensurepip, venv
if not (3, 11) <= sys.version_info[:2] <= (3, 14): sys.exit(1)
print("%d.%d" % sys.version_info[:2], sys.executable)'
try() { "$1" -c "$probe" 2>/dev/null; }

default=$(try "${1:-python3}")
[ -z "${1:-}" ] || [ -n "$default" ] || exit 0
# Version managers (pyenv, asdf, uv) have one folder per version. These folders are siblings.
siblings=$(for command in python3 python; do
  "$command" -c 'import os, sys; print(os.path.dirname(sys.base_prefix))' 2>/dev/null
done | sort -u)
newest=$({
  [ -z "$default" ] || echo "$default"
  for minor in 14 13 12 11; do try "python3.$minor"; done
  for folder in $siblings; do
    for python in "$folder"/*3.1[1-4]*/bin/python3; do [ ! -x "$python" ] || try "$python"; done
  done
} | sort -s -t. -k2,2nr | head -n 1)
[ -n "$newest" ] || exit 0
printf '%s\n' "${default:-$newest}" "$newest"
