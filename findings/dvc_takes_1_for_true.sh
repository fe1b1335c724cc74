#!/usr/bin/env bash
# One would guess that a parameter changed from 1 to 1.0 or true makes its stages stale.
# DVC compares the values as Python does, where 1 == 1.0 == True: status, params diff and repro see no change and keep the old output.
# Many options read a whole number as a count and a fraction as a share ("keep: 1" is one key, "keep: 1.0" all of them).
# dvc 3.67.1. 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check dvc==3.67.1
export PATH="$folder/venv/bin:$PATH" DVC_NO_ANALYTICS=1 DVC_SITE_CACHE_DIR="$folder/site"
mkdir work
cd work
cat > keep.py <<'PYTHON'
from ruamel.yaml import YAML

keep = YAML(typ="safe").load(open("params.yaml"))["keep"]
open("kept.txt", "w").write(f"{keep if type(keep) is int else round(keep * 100)} of 100 keys")
PYTHON
cat > dvc.yaml <<'YAML'
stages:
  keep:
    cmd: python keep.py
    deps: [keep.py]
    params: [keep]
    outs: [kept.txt]
YAML
git init --quiet
dvc init --quiet
echo "keep: 1" > params.yaml
dvc repro --quiet
git add --all
git -c user.name=name -c user.email=name@example.com commit --quiet --message "keep one key"
echo "dvc $(dvc --version)"
echo "keep: 1 -> $(cat kept.txt)"
echo "guess: keep: 1.0 and keep: true are changes, and 1.0 keeps 100 of 100 keys"
for value in 1.0 true; do
    echo "keep: $value" > params.yaml
    status=$(dvc status)
    changes=$(dvc params diff)
    dvc repro --quiet
    echo "seen:  keep: $value -> status: $status params diff: ${changes:-nothing}; after repro: $(cat kept.txt)"
    if [[ $status != *"up to date"* || -n $changes || $(cat kept.txt) != "1 of 100 keys" ]]; then
        echo "changed: DVC sees the change from 1 to $value"
        exit 1
    fi
done
echo "keep: 2" > params.yaml
dvc repro --quiet
echo "keep: 2 -> $(cat kept.txt)"
[[ $(cat kept.txt) == "2 of 100 keys" ]]
