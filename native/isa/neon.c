// Advanced SIMD of ARMv8.0 (Raspberry Pi 3 and 4): products in 16 bits, two of which fit (2 * 128 * 127 = 32512), then widened.
#if defined(__aarch64__)
#include "body/neon.h"

ALWAYS_INLINE vi dot_bytes(const struct w_block *w, const int8_t *a) {
    vi sum = vdupq_n_s32(0);
    for (int g = 0; g < 8; g++) {
        int8x16_t four = four_of(a + 4 * g);
        int16x8_t low = vmull_s8(vget_low_s8(w->group[g]), vget_low_s8(four)), high = vmull_high_s8(w->group[g], four);
        sum = vpadalq_s16(sum, vpaddq_s16(low, high));
    }
    return sum;
}
#define dot_nibbles dot_bytes

#include "body/bodies.h"
KERNELS_TABLE(kernels_neon, "neon")
#else
typedef int no_neon_here; // ISO C forbids an empty file
#endif
