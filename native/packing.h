// The layout of packed weights that pack.c writes and body/matmul.h reads; pack.c tells it.
#ifndef MESHLLM_PACKING_H
#define MESHLLM_PACKING_H
#include "blocks.h"
#include "meshllm.h"

struct packing { // span columns of a row: f16 numbers; then for each 32 columns single bytes, and groups of four bytes
    uint32_t span, n_heads, n_bytes, n_groups;
};

// Of a constant format it folds away.
static inline __attribute__((always_inline)) struct packing packing_of(uint32_t format) {
    switch (format) {
    case MESHLLM_Q4_0: case MESHLLM_IQ4_NL: return (struct packing){MESHLLM_BLOCK, 1, 0, 4};
    case MESHLLM_Q4_1: return (struct packing){MESHLLM_BLOCK, 2, 0, 4};
    case MESHLLM_Q5_0: return (struct packing){MESHLLM_BLOCK, 1, 0, 5};
    case MESHLLM_Q5_1: return (struct packing){MESHLLM_BLOCK, 2, 0, 5};
    case MESHLLM_Q8_0: return (struct packing){MESHLLM_BLOCK, 1, 0, 8};
    case MESHLLM_Q2_K: return (struct packing){SUPER_BLOCK, 2, 2, 2};
    case MESHLLM_Q3_K: return (struct packing){SUPER_BLOCK, 1, 2, 3};
    case MESHLLM_Q4_K: return (struct packing){SUPER_BLOCK, 2, 2, 4};
    case MESHLLM_Q5_K: return (struct packing){SUPER_BLOCK, 2, 2, 5};
    default: return (struct packing){SUPER_BLOCK, 1, 2, 6}; // Q6_K
    }
}

static inline __attribute__((always_inline)) size_t packed_sub_bytes(struct packing p) { return p.n_bytes + 4 * p.n_groups; } // of 32 columns

static inline __attribute__((always_inline)) size_t packed_row_bytes(struct packing p) { // of span columns
    return 2 * p.n_heads + p.span / MESHLLM_BLOCK * packed_sub_bytes(p);
}
#endif
