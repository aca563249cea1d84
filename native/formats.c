// The rows of a GGUF tensor: their size and their values. Source of each layout: ggml's block_q4_0, block_q4_1, block_q8_0.
#include <string.h>

#include "blocks.h"
#include "kernels.h"

size_t format_row_size(uint32_t format, uint32_t n_cols) {
    if (format == MESHLLM_F32) return (size_t)n_cols * 4;
    if (format == MESHLLM_F16) return (size_t)n_cols * 2;
    size_t block = format_block_size(format);
    return n_cols % MESHLLM_BLOCK ? 0 : n_cols / MESHLLM_BLOCK * block;
}

size_t format_block_size(uint32_t format) {
    switch (format) {
    case MESHLLM_Q4_0: return sizeof(struct q4_0_block);
    case MESHLLM_Q4_1: return sizeof(struct q4_1_block);
    case MESHLLM_Q8_0: return sizeof(struct q8_0_block);
    default: return 0;
    }
}

static void q4_0_values(float *out, const struct q4_0_block *b) {
    float d = f32_of_f16(b->scale);
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)((b->nibbles[i] & 15) - 8);
        out[i + 16] = d * (float)((b->nibbles[i] >> 4) - 8);
    }
}

static void q4_1_values(float *out, const struct q4_1_block *b) {
    float d = f32_of_f16(b->scale), m = f32_of_f16(b->min);
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)(b->nibbles[i] & 15) + m;
        out[i + 16] = d * (float)(b->nibbles[i] >> 4) + m;
    }
}

static void q8_0_values(float *out, const struct q8_0_block *b) {
    float d = f32_of_f16(b->scale);
    for (int i = 0; i < 32; i++) out[i] = d * (float)b->values[i];
}

int meshllm_dequantize_row(uint32_t format, float *out, uint32_t n_cols, const void *row) {
    if (!format_row_size(format, n_cols)) return MESHLLM_BAD_ARGUMENT;
    const uint8_t *p = row; // rows need not be aligned: blocks are copied out
    if (format == MESHLLM_F32) {
        memcpy(out, row, (size_t)n_cols * 4);
        return MESHLLM_OK;
    }
    if (format == MESHLLM_F16) {
        for (uint32_t i = 0; i < n_cols; i++) {
            uint16_t half;
            memcpy(&half, p + (size_t)i * 2, 2);
            out[i] = f32_of_f16(half);
        }
        return MESHLLM_OK;
    }
    union {
        struct q4_0_block q4_0;
        struct q4_1_block q4_1;
        struct q8_0_block q8_0;
    } block;
    size_t size = format_block_size(format);
    for (uint32_t i = 0; i < n_cols; i += MESHLLM_BLOCK, p += size) {
        memcpy(&block, p, size);
        if (format == MESHLLM_Q4_0) q4_0_values(out + i, &block.q4_0);
        else if (format == MESHLLM_Q4_1) q4_1_values(out + i, &block.q4_1);
        else q8_0_values(out + i, &block.q8_0);
    }
    return MESHLLM_OK;
}
