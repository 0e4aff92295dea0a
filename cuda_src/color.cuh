// Changes of colour that look at one pixel, and contrast once a frame's mean is known. The truth they must equal is
// gpupipe/data/transform/adjust.py.
#pragma once

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

__device__ __forceinline__ float turned(float most, float span, float hue, float phase) {
  const float x = phase + hue;
  const float k = x - 6.f * floorf(x * (1.f / 6.f));
  return most - span * __saturatef(fminf(k, 4.f - k));
}

__device__ __forceinline__ Rgb turn_hue(const Rgb& c, float turns) {
  const float most = fmaxf(c.r, fmaxf(c.g, c.b)), span = most - fminf(c.r, fminf(c.g, c.b));
  const float inverse = __fdividef(1.f, span == 0.f ? 1.f : span);
  float hue = 4.f + (c.r - c.g) * inverse;
  if (most == c.g) hue = 2.f + (c.b - c.r) * inverse;
  if (most == c.r) hue = (c.g - c.b) * inverse;
  hue += 6.f * turns;
  return {turned(most, span, hue, 5.f), turned(most, span, hue, 3.f), turned(most, span, hue, 1.f)};
}

__device__ __forceinline__ float posterized(float x, float levels) {
  return fminf(fmaxf(floorf(x * levels), 0.f), levels - 1.f) / levels;
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
        const float levels = exp2f(value);
#pragma unroll
        for (Rgb& c : pixels) c = {posterized(c.r, levels), posterized(c.g, levels), posterized(c.b, levels)};
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
