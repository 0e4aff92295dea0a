// Changes of colour on RGB clips that need more of a frame than a pixel and its mean: autocontrast and equalise, which look at one
// channel of a frame as a whole, and sharpness, which looks at a pixel's neighbours. The truth they must equal is
// gpupipe/data/transform/adjust.py.
//
// What is counted is whole numbers and extremes, so the order in which threads come changes nothing.
constexpr int kThreads = 512;
constexpr int kBins = 256;
constexpr int kCopies = 8;  // of a histogram: neighbouring pixels are of like colours, and would wait for each other

struct Levels {
  unsigned long long rgb;  // (channels of all frames, height, width) float32
  unsigned long long out;  // likewise, elsewhere
  int height, width;
  float factor;  // of sharpness
  int clamp;     // RGB is held within [0, 1]
};
static_assert(sizeof(Levels) == 32, "gpupipe/data/transform/levels.py packs this struct");

extern __shared__ double shared_memory[];

// A block makes one channel of one frame.
extern "C" __global__ void __launch_bounds__(kThreads) levels_autocontrast(const __grid_constant__ Levels job) {
  float* least = reinterpret_cast<float*>(shared_memory);
  float* most = least + kThreads;
  const int pixels = job.height * job.width, thread = threadIdx.x;
  const float* from = reinterpret_cast<const float*>(job.rgb) + static_cast<long long>(blockIdx.x) * pixels;
  float* out = reinterpret_cast<float*>(job.out) + static_cast<long long>(blockIdx.x) * pixels;
  float low = from[0], high = low;
  for (int k = thread; k < pixels; k += kThreads) {
    low = fminf(low, from[k]);
    high = fmaxf(high, from[k]);
  }
  least[thread] = low;
  most[thread] = high;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
    least[thread] = fminf(least[thread], least[thread + half]);
    most[thread] = fmaxf(most[thread], most[thread + half]);
  }
  __syncthreads();
  const bool flat = least[0] == most[0];
  const float bottom = flat ? 0.f : least[0], span = flat ? 1.f : most[0] - least[0];
  for (int k = thread; k < pixels; k += kThreads) out[k] = __saturatef((from[k] - bottom) / span);
}

// The factor spreads [0, 1] evenly over 0 ... 255, as torchvision's ToDtype(uint8, scale=True) does.
__device__ __forceinline__ int code_of(float value) { return static_cast<int>(__saturatef(value) * (kBins - 1e-3f)); }

// A block makes one channel of one frame, by the integer rule of Pillow's ImageOps.equalize.
extern "C" __global__ void __launch_bounds__(kThreads) levels_equalize(const __grid_constant__ Levels job) {
  int* counts = reinterpret_cast<int*>(shared_memory);  // (kCopies, kBins)
  int* upto = counts + kCopies * kBins;                 // (kBins): pixels up to a code
  int* last = upto + kBins;                             // pixels of the largest code there is
  const int pixels = job.height * job.width, thread = threadIdx.x;
  const float* from = reinterpret_cast<const float*>(job.rgb) + static_cast<long long>(blockIdx.x) * pixels;
  float* out = reinterpret_cast<float*>(job.out) + static_cast<long long>(blockIdx.x) * pixels;
  for (int k = thread; k < kCopies * kBins; k += kThreads) counts[k] = 0;
  __syncthreads();
  for (int k = thread; k < pixels; k += kThreads) atomicAdd(counts + thread / 32 % kCopies * kBins + code_of(from[k]), 1);
  __syncthreads();
  int count = 0;
  if (thread < kBins) {
    for (int copy = 0; copy < kCopies; ++copy) count += counts[copy * kBins + thread];
    upto[thread] = count;
  }
  for (int step = 1; step < kBins; step *= 2) {
    __syncthreads();
    const int before = thread >= step && thread < kBins ? upto[thread - step] : 0;
    __syncthreads();
    if (thread < kBins) upto[thread] += before;
  }
  __syncthreads();
  if (thread < kBins && count > 0 && upto[thread] == pixels) last[0] = count;
  __syncthreads();
  const int step = (pixels - last[0]) / 255;
  for (int k = thread; k < pixels; k += kThreads) {
    int code = code_of(from[k]);
    if (step > 0 && code > 0) code = min((upto[code - 1] + step / 2) / step, 255);
    out[k] = static_cast<float>(code) / 255.f;
  }
}

// A block makes a part of one channel of one frame.
extern "C" __global__ void __launch_bounds__(kThreads) levels_sharpness(const __grid_constant__ Levels job) {
  const int pixels = job.height * job.width, pixel = blockIdx.x * kThreads + threadIdx.x;
  if (pixel >= pixels) return;
  const float* at = reinterpret_cast<const float*>(job.rgb) + static_cast<long long>(blockIdx.y) * pixels + pixel;
  float value = at[0];
  const int row = pixel / job.width, column = pixel % job.width;
  if (row > 0 && row < job.height - 1 && column > 0 && column < job.width - 1) {
    float sum = 4.f * value;
    for (int y = -job.width; y <= job.width; y += job.width) sum += at[y - 1] + at[y] + at[y + 1];
    value = value * job.factor + sum * (1.f / 13.f) * (1.f - job.factor);
  }
  if (job.clamp) value = __saturatef(value);
  reinterpret_cast<float*>(job.out)[static_cast<long long>(blockIdx.y) * pixels + pixel] = value;
}
