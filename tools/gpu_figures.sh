#!/usr/bin/env bash
# Measures every figure of docs/performance.md anew on this machine's GPU, one benchmark after the other.
#
#   tools/gpu_figures.sh                             # into benchmarks/results, about an hour; then python benchmarks/figures.py
#   tools/gpu_figures.sh /tmp/results decode ops     # two of them, elsewhere
#
# Each writes its file as it goes, so what is ended early keeps what it has measured. The machine should have nothing else to do.
# Their logs go to LOGS, else to a temporary folder; one that takes more than LIMIT seconds is ended.
# Exits with 1 if one of them failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-benchmarks/results}")
shift || true
python=${PYTHON:-$(command -v python3 || command -v python)}
limit=${LIMIT:-900}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$out" "$logs"
echo "logs in $logs" >&2

declare -A commands=( # what fits into ten minutes each
  [train]="bench_train.py"
  [block]="bench_block.py"
  [loader_train]="bench_loader_train.py --budget 430"
  [decode]="bench_decode.py --budget 2.5"
  [loader]="bench_loader.py --budget 5"
  [transform]="bench_transform.py"
  [ops]="bench_ops.py --minutes 8"
  [beside]="bench_beside.py"
  [conformance]="conformance.py"
  [ranking]="ranking.py --most 12"
  [soak]="soak.py --minutes 8"
)
order=(train block loader_train decode loader transform ops beside conformance ranking soak)
names=("${@:-${order[@]}}")
for name in "${names[@]}"; do
  if [ -z "${commands[$name]:-}" ]; then
    echo "$name is none of: ${order[*]}" >&2
    exit 2
  fi
done
failed=0
for name in "${names[@]}"; do
  read -ra words <<<"${commands[$name]}"
  begin=$SECONDS
  timeout --kill-after=20 "$limit" "$python" benchmarks/"${words[@]}" --out "$out" >"$logs/$name.log" 2>&1
  status=$?
  printf '%-13s exit %-4s %4d s  %s\n' "$name" "$status" $((SECONDS - begin)) "$(grep -v '^$' "$logs/$name.log" | tail -n 1)"
  if [ "$status" != 0 ]; then
    failed=1
    tail -n 20 "$logs/$name.log" >&2
  fi
done
exit "$failed"
