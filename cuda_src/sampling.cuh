// Where an output pixel's samples lie and what they weigh, along one axis of the stored frame.
// The definition is that of gpupipe/data/transform/geometry.py; this is its second half, in single precision.
#pragma once

struct Axis {
  double start;           // where the box begins, in luma samples; sample k covers k to k + 1
  double scale;           // luma samples an output
  double support;         // half the triangle's width in luma samples
  float chroma_step;      // chroma samples a luma sample: 1, 1/2 or 1/4
  float chroma_offset;    // luma position of chroma sample 0
  float inverse;          // 1 / support
  int low, high;          // luma samples that may be read: low ... high - 1
  int outputs;
  int chroma_size;
  int unused;
};
static_assert(sizeof(Axis) == 56, "gpupipe/data/transform/resize.py packs this struct");

// One output's samples: luma first ... first + count - 1, and chroma likewise.
struct Taps {
  int first, count, chroma_first, chroma_count;
  float centre;   // of the output, relative to sample first's left edge
  float inverse;  // 1 / support
  float norm;     // 1 / sum of the luma weights
  int unused;
};

__device__ __forceinline__ int clamp_int(int value, int low, int high) { return min(max(value, low), high); }

// The triangle at luma sample first + tap, not yet normalised. Zero outside the taps.
__device__ __forceinline__ float triangle(const Taps& taps, int tap) {
  const float weight = 1.f - fabsf(static_cast<float>(tap) + 0.5f - taps.centre) * taps.inverse;
  return (tap < 0 || tap >= taps.count) ? 0.f : fmaxf(weight, 0.f);
}

// Centres are worked out in double: at column 8000 a float knows a position only to 1/2000 of a sample.
__device__ __forceinline__ Taps find_taps(const Axis& axis, int output) {
  const double centre = axis.start + axis.scale * (output + 0.5);
  Taps taps;
  taps.first = max(axis.low, static_cast<int>(floor(centre - axis.support + 0.5)));
  taps.count = min(axis.high, static_cast<int>(floor(centre + axis.support + 0.5))) - taps.first;
  taps.centre = static_cast<float>(centre - taps.first);
  taps.inverse = axis.inverse;
  float sum = 0.f;
  for (int tap = 0; tap < taps.count; ++tap) sum += triangle(taps, tap);
  taps.norm = 1.f / sum;
  const int last = taps.first + taps.count - 1;
  const int top = axis.chroma_size - 1;
  taps.chroma_first = clamp_int(static_cast<int>(floorf((taps.first - axis.chroma_offset) * axis.chroma_step)), 0, top);
  const int end = clamp_int(static_cast<int>(floorf((last - axis.chroma_offset) * axis.chroma_step)) + 1, 0, top);
  taps.chroma_count = end - taps.chroma_first + 1;
  taps.unused = 0;
  return taps;
}

__device__ __forceinline__ float luma_weight(const Taps& taps, int tap) { return triangle(taps, tap) * taps.norm; }

// Luma position x reads chroma at p = (x - offset) * step, held within the plane, from its two neighbours. So chroma sample k is
// read by the positions with |p - k| < 1, which lie within 1 / step of its own position; at the plane's edges those beyond it too,
// and these are no farther away.
__device__ __forceinline__ float chroma_weight(const Axis& axis, const Taps& taps, int tap) {
  if (tap >= taps.chroma_count) return 0.f;
  const int k = taps.chroma_first + tap;
  const int reach = static_cast<int>(1.f / axis.chroma_step);
  const int begin = reach * (k - 1) + static_cast<int>(floorf(axis.chroma_offset));
  const float top = static_cast<float>(axis.chroma_size - 1);
  float sum = 0.f;
  for (int x = begin; x <= begin + 2 * reach + 1; ++x) {
    const float place = fminf(fmaxf((x - axis.chroma_offset) * axis.chroma_step, 0.f), top);
    sum += triangle(taps, x - taps.first) * fmaxf(0.f, 1.f - fabsf(place - k));
  }
  return sum * taps.norm;
}
