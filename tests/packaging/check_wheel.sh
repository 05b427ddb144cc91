#!/usr/bin/env bash
# Build the wheel, install it into a clean environment and run the command from / : what editable installs hide shows here.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"  # a copy, so that nothing of an earlier build gets in, nor one that runs beside this
cp -r "$root"/{advisor,cost_models,rules,pyproject.toml,README.md,LICENSE} "$work/source"
"$root/.venv/bin/python" -m build --wheel --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
python3 -m venv "$work/venv"
install() { "$work/venv/bin/python" -m pip install --quiet --no-compile -c "$root/constraints.txt" "$@"; }
install torch
install "$work"/dist/*.whl
cp "$root/examples/gpt2.py" "$work/gpt2.py"
cd /
"$work/venv/bin/advise" --version
"$work/venv/bin/advise" explain | grep -q . || { echo "no rules in the wheel"; exit 1; }
"$work/venv/bin/advise" "$work/gpt2.py" --capture traced --gpu a100-sxm-80gb --out "$work/advice" -- --layers 2 --width 64 --heads 4 --seq 64 --vocab 512 >"$work/out.txt"
grep -q "USE THIS" "$work/out.txt"
test -s "$work/advice/report.json" -a -s "$work/advice/report.html" -a -s "$work/advice/plan-1/train.py"
echo "wheel: installed, ran from /, wrote $(find "$work/advice" -type f | wc -l) files"
