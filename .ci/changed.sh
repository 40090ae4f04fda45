#!/bin/sh
# changed.sh: prints the tests of the files that differ from main, or from the commit BASE. The tests of jaxmp/FOLDER are
# tests/FOLDER, and those of an inspection tool have its name. A changed test file is printed itself.
set -eu
base=${BASE:-$(git for-each-ref --sort=-refname --format='%(refname)' refs/heads/main refs/remotes/origin/main | head -n 1)}
base=$(git merge-base HEAD "${base:-HEAD}")
# On main itself, the last commit is the change.
[ -n "${BASE:-}" ] || [ "$base" != "$(git rev-parse HEAD)" ] || base=$(git rev-parse --verify --quiet HEAD~1 || echo HEAD)
changed=$(git diff --name-only --no-renames "$base" && git ls-files --others --exclude-standard)
echo "$changed" | sed -n -E \
  -e '/^(tests\/.*test_[^/]*\.py)$/{p;d;}' \
  -e 's|^jaxmp/inspect/_([a-z]+)/.*\.py$|tests/inspect/test_\1*.py|p;t' \
  -e 's|^jaxmp/([a-z]+)/.*\.py$|tests/\1|p;t' \
  -e 's|^jaxmp/([a-z]+)\.py$|tests/test_\1.py|p' | while read -r pattern; do
  for path in $pattern; do if [ -e "$path" ]; then echo "$path"; fi; done
done | sort -u
