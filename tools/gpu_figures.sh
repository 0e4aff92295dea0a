#!/usr/bin/env bash
# Measures every figure of docs/performance.md anew on this machine's GPU, one benchmark after the other.
#
#   tools/gpu_figures.sh                                    # into benchmarks/results; then python benchmarks/figures.py
#   tools/gpu_figures.sh /tmp/results decode ops            # two of them, elsewhere
#   tools/gpu_figures.sh --minutes 4 /tmp/results train     # so long for each, and no longer
#   tools/gpu_figures.sh --quick /tmp/results               # tiny sizes on the CPU, to see that all of them run
#
# Each writes its file as it goes, so what is ended at the limit (9.5 minutes by default) keeps what it has measured. The machine
# should have nothing else to do. train, train_models and train_fed go into one file, whose rows name their commit where it is another.
# Options of one benchmark: ARGS="--models wan --append" tools/gpu_figures.sh /tmp/results train
# Their logs go to LOGS, else to a temporary folder. Exits with 1 if one of them failed; being ended at the limit is no failure.
set -uo pipefail
minutes=9.5
quick=
while [[ "${1:-}" == --* ]]; do
  case "$1" in
    --minutes) minutes=${2:?minutes for each benchmark}; shift 2 ;;
    --quick) quick=1; shift ;;
    *) echo "$1 is no option: see the head of $0" >&2; exit 2 ;;
  esac
done
out=$(realpath -m "${1:-"$(dirname "$0")/../benchmarks/results"}")
shift || true
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || command -v python)}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$out" "$logs"
echo "logs in $logs" >&2

limit=$(awk "BEGIN { print 60 * $minutes }")
# What a benchmark may begin another piece of work in: the rest is for that piece.
own_minutes=$(awk "BEGIN { print 0.85 * $minutes }")
own_seconds=$(awk "BEGIN { s = 60 * $minutes - 90; print (s > 1 ? s : 1) }")

declare -A commands=(
  [conformance]="conformance.py"
  [decode]="bench_decode.py --budget 2.5"
  [loader]="bench_loader.py --budget 5"
  [transform]="bench_transform.py"
  [beside]="bench_beside.py"
  [ranking]="ranking.py --most 12"
  [ops]="bench_ops.py --minutes $own_minutes"
  [block]="bench_block.py"
  [loader_train]="bench_loader_train.py --budget $own_seconds"
  [train]="bench_train.py --minutes $own_minutes --models dit --feeds --append"
  [train_models]="bench_train.py --minutes $own_minutes --models wan hunyuan --feeds --append"
  [train_fed]="bench_train.py --minutes $own_minutes --models --feeds pixels latents --append"
  [scaling]="bench_scaling.py --ranks 1"
  [soak]="soak.py --minutes $own_minutes"
)
order=(train block loader_train decode loader transform ops beside conformance ranking train_fed train_models scaling soak)
if [ -n "$quick" ]; then
  commands=()
  order=(conformance decode loader transform beside ops block loader_train train scaling soak)
  for name in "${order[@]}"; do commands[$name]="bench_$name.py --quick"; done
  commands[conformance]="conformance.py --device cpu --subjects gpupipe-cpu --shared /nowhere --only h264_hidden_start vp9_layers"
  commands[scaling]="bench_scaling.py --quick --ranks 1"
  commands[soak]="soak.py --minutes 0.1 --device cpu --files 24 --kinds h264-tiny"
fi
failed=0
for name in "${@:-${order[@]}}"; do
  if [ -z "${commands[$name]:-}" ]; then
    echo "$name is none of: ${order[*]}" >&2
    exit 2
  fi
  read -ra words <<<"${commands[$name]} ${ARGS:-}"
  begin=$SECONDS
  timeout --kill-after=20 "$limit" "$python" benchmarks/"${words[@]}" --out "$out" >"$logs/$name.log" 2>&1
  status=$?
  case $status in
    0) told="exit 0" ;;
    124 | 137) told="ended" ;;
    *) told="exit $status"; failed=1 ;;
  esac
  printf '%-13s %-8s %4d s  %s\n' "$name" "$told" $((SECONDS - begin)) "$(grep -v '^$' "$logs/$name.log" | tail -n 1)"
  [ "${told#exit }" = "$told" ] || [ "$told" = "exit 0" ] || tail -n 20 "$logs/$name.log" >&2
done
exit "$failed"
