// Advanced SIMD of ARMv8.0 (Raspberry Pi 3 and 4): products in 16 bits, two of which fit (2 * 128 * 127 = 32512), then widened.
#if defined(__aarch64__)
#include "body/neon.h"

ALWAYS_INLINE dots add_bytes(dots d, w_group w, int8x16_t four) {
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(four)), high = vmull_high_s8(w, four);
    return vpadalq_s16(d, vpaddq_s16(low, high));
}

#include "body/bodies.h"
KERNELS_TABLE(kernels_neon, "neon")
#else
typedef int no_neon_here; // ISO C forbids an empty file
#endif
