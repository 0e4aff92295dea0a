// Changes of colour that look at one pixel, and contrast once a frame's mean is known. The truth they must equal is
// gpupipe/data/transform/adjust.py.
#pragma once
#include "machine.cuh"

constexpr int kMaxSteps = 8;

enum Kind : unsigned char { kBrightness, kSaturation, kGrayscale, kChannelDrop, kContrast, kHue, kPosterize, kSolarize };

struct ColorSteps {
  float value[kMaxSteps];
  unsigned char kind[kMaxSteps];
  int count;
  int clamp;  // RGB is held within [0, 1] after each step
};
static_assert(sizeof(ColorSteps) == 48, "gpupipe/data/transform/finish.py packs this struct");

struct Rgb {
  float r, g, b;
};

__device__ __forceinline__ float grey_of(const Rgb& c) { return 0.2989f * c.r + 0.587f * c.g + 0.114f * c.b; }
__device__ __forceinline__ float blend(float one, float other, float share) { return share * one + (1.f - share) * other; }

// `turn` is in sixths of a circle and 1 to 7, which makes the hue 0 to 12. Channels are least + span * share(hue).
__device__ __forceinline__ Rgb turn_hue(const Rgb& c, float turn) {
  const float most = fmaxf(c.r, fmaxf(c.g, c.b)), least = fminf(c.r, fminf(c.g, c.b)), span = most - least;
  float from = c.r - c.g, start = 4.f;
  if (most == c.g) from = c.b - c.r, start = 2.f;
  if (most == c.r) from = c.g - c.b, start = 0.f;
  float hue = from * reciprocal(fmaxf(span, 1e-30f)) + (start + turn);
  if (hue >= 6.f) hue -= 6.f;
  return {least + span * __saturatef(fabsf(hue - 3.f) - 1.f), least + span * __saturatef(2.f - fabsf(hue - 2.f)),
          least + span * __saturatef(2.f - fabsf(hue - 4.f))};
}

__device__ __forceinline__ float posterized(float x, float levels, float step) {
  return fminf(fmaxf(floorf(x * levels), 0.f), levels - 1.f) * step;
}

// All steps, to some pixels at once: which step comes is the same for a whole block, so asking costs one branch for all of them.
// `mean` is that of the frame's greys, for contrast.
template <int kPixels>
__device__ __forceinline__ void change(const ColorSteps& steps, Rgb (&pixels)[kPixels], float mean) {
#pragma unroll 1
  for (int step = 0; step < steps.count; ++step) {
    const float value = steps.value[step];
    switch (steps.kind[step]) {
      case kBrightness:
#pragma unroll
        for (Rgb& c : pixels) c = {value * c.r, value * c.g, value * c.b};
        break;
      case kSaturation:
#pragma unroll
        for (Rgb& c : pixels) {
          const float grey = grey_of(c);
          c = {blend(c.r, grey, value), blend(c.g, grey, value), blend(c.b, grey, value)};
        }
        break;
      case kGrayscale:
#pragma unroll
        for (Rgb& c : pixels) {
          const float grey = grey_of(c);
          c = {grey, grey, grey};
        }
        break;
      case kChannelDrop:
#pragma unroll
        for (Rgb& c : pixels) c = {value == 0.f ? 0.f : c.r, value == 1.f ? 0.f : c.g, value == 2.f ? 0.f : c.b};
        break;
      case kContrast:
#pragma unroll
        for (Rgb& c : pixels) c = {blend(c.r, mean, value), blend(c.g, mean, value), blend(c.b, mean, value)};
        break;
      case kHue:
#pragma unroll
        for (Rgb& c : pixels) c = turn_hue(c, value);
        break;
      case kPosterize: {
        const float step = __uint_as_float(0x7F000000u - __float_as_uint(value));  // 1 / value, which is a power of two
#pragma unroll
        for (Rgb& c : pixels) c = {posterized(c.r, value, step), posterized(c.g, value, step), posterized(c.b, value, step)};
        break;
      }
      default:  // kSolarize
#pragma unroll
        for (Rgb& c : pixels)
          c = {c.r >= value ? 1.f - c.r : c.r, c.g >= value ? 1.f - c.g : c.g, c.b >= value ? 1.f - c.b : c.b};
    }
    if (steps.clamp) {
#pragma unroll
      for (Rgb& c : pixels) c = {__saturatef(c.r), __saturatef(c.g), __saturatef(c.b)};
    }
  }
}
