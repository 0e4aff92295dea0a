#!/usr/bin/env bash
# Measures every figure of docs/performance.md anew on this machine's GPU, one benchmark after the other.
#
#   tools/gpu_figures.sh                             # into benchmarks/results, about an hour; then python benchmarks/figures.py
#   tools/gpu_figures.sh /tmp/results decode ops     # two of them, elsewhere
#
# Each writes its file as it goes, so what is ended early keeps what it has measured. The machine should have nothing else to do.
# Exits with 1 if one of them failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-benchmarks/results}")
shift || true
python=${PYTHON:-python}
mkdir -p "$out"
logs=$(mktemp -d)
echo "logs in $logs" >&2

declare -A commands=( # what fits into ten minutes each
  [conformance]="conformance.py"
  [decode]="bench_decode.py --budget 2.5"
  [loader]="bench_loader.py --budget 5"
  [transform]="bench_transform.py"
  [beside]="bench_beside.py"
  [ranking]="ranking.py --most 12"
  [ops]="bench_ops.py --minutes 8"
  [block]="bench_block.py"
  [loader_train]="bench_loader_train.py --budget 430"
  [train]="bench_train.py"
  [soak]="soak.py --minutes 8"
)
order=(conformance decode loader transform beside ranking ops block loader_train train soak)
failed=0
for name in "${@:-${order[@]}}"; do
  if [ -z "${commands[$name]:-}" ]; then
    echo "$name is none of: ${order[*]}" >&2
    exit 2
  fi
  read -ra words <<<"${commands[$name]}"
  begin=$SECONDS
  "$python" benchmarks/"${words[@]}" --out "$out" >"$logs/$name.log" 2>&1
  status=$?
  [ "$status" = 0 ] || failed=1
  printf '%-13s exit %-4s %4d s  %s\n' "$name" "$status" $((SECONDS - begin)) "$(grep -v '^$' "$logs/$name.log" | tail -n 1)"
done
exit "$failed"
