// Dots of blocks with SDOT, for the NEON files that have it; see matmul.h. Included after body/neon.h.
#include "body/neon.h"

ALWAYS_INLINE vi add_dots(vi sum, int8x16_t w, int8x16_t a, size_t lane) { // the instruction wants its lane as a constant
    switch (lane) {
    case 0: return vdotq_laneq_s32(sum, w, a, 0);
    case 1: return vdotq_laneq_s32(sum, w, a, 1);
    case 2: return vdotq_laneq_s32(sum, w, a, 2);
    default: return vdotq_laneq_s32(sum, w, a, 3);
    }
}

// The 32 activations of a token stay in two registers and are taken by lane: no broadcast. Two sums a chain, since one token on two
// panels has but two chains and SDOT a latency of two to four cycles.
ALWAYS_INLINE void sdot_blocks(vi *sums, uint32_t format, const uint8_t *groups, size_t w_step, const int8_t *values, size_t a_step, size_t n,
                              size_t first, size_t last) {
    vi chains[2][TILE];
    int8x16_t a[TILE][2];
    for (size_t i = 0; i < n; i++)
        for (size_t half = 0; half < 2; half++) chains[half][i] = vdupq_n_s32(0), a[i][half] = vld1q_s8(values + i * a_step + 16 * half);
    for (size_t g = 0; g < 4; g++)
        for (size_t i = 0; i < n; i++)
            for (size_t half = first; half < last; half++)
                chains[half][i] = add_dots(chains[half][i], bytes_of(groups + i * w_step, format, g + 4 * half), a[i][half], g);
    for (size_t i = 0; i < n; i++) sums[i] = vaddq_s32(chains[0][i], chains[1][i]);
}
