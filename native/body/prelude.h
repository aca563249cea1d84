// What every ISA file includes before its primitives.
#ifndef MESHLLM_PRELUDE_H
#define MESHLLM_PRELUDE_H
#include <float.h>
#include <math.h>
#include <string.h>

#include "blocks.h"
#include "kernels.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#ifndef TILE // of 16 registers; a multiple of 4
#define TILE 4 // chains of sums that a product keeps in registers
#endif

ALWAYS_INLINE size_t format_block_size_of(uint32_t format) { // of a constant: folds away
    return format == MESHLLM_Q4_0 ? 18 : format == MESHLLM_Q4_1 ? 20 : 34;
}
#endif
