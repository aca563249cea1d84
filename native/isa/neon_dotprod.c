// Advanced SIMD with SDOT (Raspberry Pi 5, most ARMv8.2 and later). Compiled with -march=armv8.2-a+dotprod, this file alone.
#if defined(__aarch64__)
#include "body/neon.h"

ALWAYS_INLINE vi dot_bytes(const struct w_block *w, const int8_t *a) {
    vi even = vdupq_n_s32(0), odd = vdupq_n_s32(0); // two chains: SDOT has a latency of three or four cycles
    for (int g = 0; g < 8; g += 2) {
        even = vdotq_s32(even, w->group[g], four_of(a + 4 * g));
        odd = vdotq_s32(odd, w->group[g + 1], four_of(a + 4 * g + 4));
    }
    return vaddq_s32(even, odd);
}
#define dot_nibbles dot_bytes

#include "body/bodies.h"
KERNELS_TABLE(kernels_neon_dotprod, "neon-dotprod")
#else
typedef int no_neon_dotprod_here; // ISO C forbids an empty file
#endif
