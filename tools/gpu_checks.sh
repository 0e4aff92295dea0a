#!/usr/bin/env bash
# What a GPU has to show besides benchmarks, side by side: the GPU tests, a long soak, and compute-sanitizer over the transforms.
#
#   tools/gpu_checks.sh /tmp/checks                    # some ten minutes; a log of each in /tmp/checks, a line of each at the end
#   tools/gpu_checks.sh /tmp/checks tests              # the tests alone, so that nothing disturbs their clocks
#   MINUTES=1 WORKERS=4 LIMIT=300 tools/gpu_checks.sh /tmp/checks soak tests memcheck racecheck
#   TESTS="tests/gpu/test_graphs_gpu.py -k loader" tools/gpu_checks.sh /tmp/checks tests
#
# LIMIT seconds after the start what still runs is ended. Each failure of a test is in failures.log as soon as it is known.
# Exits with 1 if one of them failed. The soak's result file lands in the same folder.
set -uo pipefail
out=${1:?the folder for logs}
shift
minutes=${MINUTES:-8}
workers=${WORKERS:-6}
limit=${LIMIT:-900}
python=${PYTHON:-$(command -v python3 || command -v python)}
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.."
states=$(mktemp -d)
trap 'rm -rf "$states"' EXIT

run() { # name, command...
  local name=$1
  shift
  timeout --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1
  echo $? >"$states/$name"
}

sanitize() { # tool: only our own kernels, since torch's would take most of the time
  local ours=() name
  for name in clip resize move color blur levels; do ours+=(--kernel-regex "kns=$name"); done
  run "$1" compute-sanitizer --tool "$1" "${ours[@]}" --target-processes all --error-exitcode 9 \
    "$python" -m pytest -m gpu -q -p no:cacheprovider --timeout 1200 tests/gpu/test_transform_gpu.py
}

names=("$@")
for name in "${names[@]}"; do
  case $name in soak | tests | memcheck | racecheck) ;; *)
    echo "$name is none of: soak tests memcheck racecheck" >&2
    exit 2
    ;;
  esac
done
if [ ${#names[@]} = 0 ]; then
  names=(soak tests)
  if command -v compute-sanitizer >/dev/null; then
    names+=(memcheck racecheck)
  else
    echo "compute-sanitizer is not on the PATH: left out" >&2
  fi
fi
rm -f "$out/failures.log"
for name in "${names[@]}"; do
  case $name in
    soak) run soak "$python" benchmarks/soak.py --minutes "$minutes" --out "$out" & ;;
    tests)
      if [ -n "${TESTS:-}" ]; then
        read -ra files <<<"$TESTS"
      else # the others would only be read and left out, by every worker
        mapfile -t files < <(grep -rlE 'pytest\.mark\.gpu' tests --include='test_*.py' | sort)
      fi
      GPUPIPE_FAILURES=$out/failures.log GPUPIPE_REQUIRE_GPU=1 run tests \
        "$python" -m pytest -m gpu -v -n "$workers" -p no:cacheprovider --timeout 600 --durations 15 "${files[@]}" &
      ;;
    *) sanitize "$name" & ;;
  esac
done
wait
failed=0
for name in "${names[@]}"; do
  status=$(cat "$states/$name")
  [ "$status" = 0 ] || failed=1
  printf '%-10s exit %-4s %s\n' "$name" "$status" "$(grep -v '^$' "$out/$name.log" | tail -n 1)"
done
[ ! -s "$out/failures.log" ] || grep '^====' "$out/failures.log"
exit "$failed"
