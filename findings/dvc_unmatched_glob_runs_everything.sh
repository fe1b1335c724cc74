#!/usr/bin/env bash
# One would guess that `dvc repro --glob 'train_*'` fails, or does nothing, in a pipeline without a stage of such a name: a name without --glob is refused.
# DVC takes the empty selection for none at all and runs the whole pipeline, with exit code 0.
# A matrix that is empty in one configuration, or a misspelt pattern, so starts every training there is.
# dvc 3.67.1. 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check dvc==3.67.1
mkdir project
cd project
{
  ../venv/bin/dvc init --no-scm
  ../venv/bin/dvc config core.analytics false
} > ../messages 2>&1 || { cat ../messages >&2; exit 1; }
cat > dvc.yaml <<'YAML'
stages:
  corpus: {cmd: echo text > corpus.txt, outs: [corpus.txt]}
  train: {cmd: cp corpus.txt model.txt, deps: [corpus.txt], outs: [model.txt]}
  evaluate:
    matrix: {kernel: []}
    cmd: cp model.txt ${item.kernel}.txt
    outs: ['${item.kernel}.txt']
YAML

named=0
../venv/bin/dvc repro evaluate_all >> ../messages 2>&1 || named=$?
globbed=0
../venv/bin/dvc repro --glob 'evaluate*' >> ../messages 2>&1 || globbed=$?
made=$(ls | tr '\n' ' ')
echo "dvc $(../venv/bin/dvc --version)"
echo "guess: a pattern that no stage has runs nothing, as a name that no stage has is refused (exit code $named)"
echo "seen:  repro --glob 'evaluate*', whose matrix is empty: exit code $globbed; the folder has $made"
if [ "$named" = 0 ] || [ "$globbed" != 0 ] || [ ! -e model.txt ]; then
  echo "changed: a pattern without a stage no longer runs the others" >&2
  exit 1
fi
