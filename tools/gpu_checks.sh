#!/usr/bin/env bash
# What a GPU has to show besides benchmarks, side by side: the GPU tests, a long soak, and compute-sanitizer over the transforms.
#
#   tools/gpu_checks.sh /tmp/checks            # some ten minutes; a log of each in /tmp/checks, a line of each at the end
#   MINUTES=1 WORKERS=4 tools/gpu_checks.sh /tmp/checks
#
# Exits with 1 if one of them failed. The soak's result file lands in the same folder.
set -uo pipefail
out=${1:?the folder for logs}
minutes=${MINUTES:-8}
workers=${WORKERS:-6}
python=${PYTHON:-python}
mkdir -p "$out"
cd "$(dirname "$0")/.."

run() { # name, command...
  local name=$1
  shift
  "$@" >"$out/$name.log" 2>&1
  echo $? >"$out/$name.status"
}

# Only our own kernels: torch's would take most of the time.
ours=(--kernel-regex kns=clip --kernel-regex kns=resize --kernel-regex kns=move --kernel-regex kns=color --kernel-regex kns=blur
  --kernel-regex kns=levels)
names=(soak tests)
run soak "$python" benchmarks/soak.py --minutes "$minutes" --out "$out" &
GPUPIPE_REQUIRE_GPU=1 run tests "$python" -m pytest -m gpu -q -n "$workers" -p no:cacheprovider --timeout 600 &
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    names+=("$tool")
    run "$tool" compute-sanitizer --tool "$tool" "${ours[@]}" --target-processes all --error-exitcode 9 \
      "$python" -m pytest -m gpu -q -p no:cacheprovider --timeout 1200 tests/gpu/test_transform_gpu.py &
  done
else
  echo "compute-sanitizer is not on the PATH: left out" >&2
fi
wait
failed=0
for name in "${names[@]}"; do
  status=$(cat "$out/$name.status")
  [ "$status" = 0 ] || failed=1
  printf '%-10s exit %-4s %s\n' "$name" "$status" "$(grep -v '^$' "$out/$name.log" | tail -n 1)"
done
exit "$failed"
