// What the rows of a GGUF tensor are made of.
#ifndef MESHLLM_FORMATS_H
#define MESHLLM_FORMATS_H
#include <stdbool.h>

#include "blocks.h"
#include "meshllm.h"

size_t format_block_values(uint32_t format); // of a block: 1 for F32, F16, BF16; 0 if the format has no kernels
size_t format_block_size(uint32_t format);   // its bytes
// Bytes of n_cols values of a format in a file; 0 if the format is unknown or n_cols is no multiple of its block.
size_t format_row_size(uint32_t format, uint32_t n_cols);

static inline bool format_is_float(uint32_t format) { return format_block_values(format) == 1; }

// A block of any quantized format: value i = scale * scales[i / 16] * (a whole number of codes[i]) - min * mins[i / 16], or + min for
// Q4_1 and Q5_1.
struct plain_block {
    uint16_t scale, min; // f16
    int8_t scales[16];
    uint8_t mins[16];
    uint8_t codes[SUPER_BLOCK]; // as they stand in the file, before an offset or a table
};
void format_read_block(struct plain_block *b, uint32_t format, const void *from);
#endif
