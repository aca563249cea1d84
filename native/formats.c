// The rows of a GGUF tensor: their size, their blocks taken apart, their values. Source of each layout: the dequantize functions of ggml.
#include "formats.h"

#include <string.h>

#include "kernels.h"

const int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

size_t format_block_values(uint32_t format) {
    switch (format) {
    case MESHLLM_F32: case MESHLLM_F16: case MESHLLM_BF16: return 1;
    case MESHLLM_Q4_0: case MESHLLM_Q4_1: case MESHLLM_Q5_0: case MESHLLM_Q5_1: case MESHLLM_Q8_0: case MESHLLM_IQ4_NL: return MESHLLM_BLOCK;
    case MESHLLM_Q2_K: case MESHLLM_Q3_K: case MESHLLM_Q4_K: case MESHLLM_Q5_K: case MESHLLM_Q6_K: return SUPER_BLOCK;
    default: return 0;
    }
}

size_t format_block_size(uint32_t format) {
    switch (format) {
    case MESHLLM_F32: return 4;
    case MESHLLM_F16: case MESHLLM_BF16: return 2;
    case MESHLLM_Q4_0: return sizeof(struct q4_0_block);
    case MESHLLM_Q4_1: return sizeof(struct q4_1_block);
    case MESHLLM_Q5_0: return sizeof(struct q5_0_block);
    case MESHLLM_Q5_1: return sizeof(struct q5_1_block);
    case MESHLLM_Q8_0: return sizeof(struct q8_0_block);
    case MESHLLM_IQ4_NL: return sizeof(struct iq4_nl_block);
    case MESHLLM_Q2_K: return sizeof(struct q2_k_block);
    case MESHLLM_Q3_K: return sizeof(struct q3_k_block);
    case MESHLLM_Q4_K: return sizeof(struct q4_k_block);
    case MESHLLM_Q5_K: return sizeof(struct q5_k_block);
    case MESHLLM_Q6_K: return sizeof(struct q6_k_block);
    default: return 0;
    }
}

size_t format_row_size(uint32_t format, uint32_t n_cols) {
    size_t values = format_block_values(format);
    return !values || n_cols % values ? 0 : n_cols / values * format_block_size(format);
}

// --- blocks taken apart ----------------------------------------------------------------------------------------------

static void read_nibbles(uint8_t *codes, const uint8_t *nibbles, int n) { // n low ones, then n high ones
    for (int i = 0; i < n; i++) codes[i] = nibbles[i] & 15, codes[i + n] = nibbles[i] >> 4;
}

static void add_fifth_bits(uint8_t *codes, const uint8_t *high) {
    for (int i = 0; i < MESHLLM_BLOCK; i += 8) {
        uint64_t bits = high[i / 8] * 0x0101010101010101u & 0x8040201008040201u, eight; // bit k in byte k alone
        bits = (bits + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;                 // whether it was set
        if (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__) bits = __builtin_bswap64(bits);
        memcpy(&eight, codes + i, 8);
        eight |= bits << 4;
        memcpy(codes + i, &eight, 8);
    }
}

// codes[i] |= bits of from[i], 32 times: a loop that becomes a few vector instructions.
static void add_bits(uint8_t *codes, const uint8_t *from, int shift, int mask, int to) {
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((from[i] >> shift & mask) << to);
}

// Eight scales and eight minima of six bits in twelve bytes; each for 32 values, so for two groups of 16.
static void read_k_scales(struct plain_block *b, const uint8_t *s) {
    for (int j = 0; j < 8; j++) {
        int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        int min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
        b->scales[2 * j] = b->scales[2 * j + 1] = (int8_t)scale;
        b->mins[2 * j] = b->mins[2 * j + 1] = (uint8_t)min;
    }
}

static void read_q2_k(struct plain_block *b, const struct q2_k_block *from) {
    b->scale = from->scale, b->min = from->min;
    for (int j = 0; j < 16; j++) b->scales[j] = from->scales[j] & 15, b->mins[j] = from->scales[j] >> 4;
    memset(b->codes, 0, SUPER_BLOCK);
    for (int j = 0; j < 8; j++) add_bits(b->codes + 32 * j, from->bits + j / 4 * 32, j % 4 * 2, 3, 0);
}

static void read_q3_k(struct plain_block *b, const struct q3_k_block *from) {
    b->scale = from->scale;
    for (int j = 0; j < 16; j++) {
        int low = j < 8 ? from->scales[j] & 15 : from->scales[j - 8] >> 4, high = from->scales[8 + j % 4] >> (j / 4 * 2) & 3;
        b->scales[j] = (int8_t)((low | high << 4) - 32);
    }
    memset(b->codes, 0, SUPER_BLOCK);
    for (int j = 0; j < 8; j++) {
        add_bits(b->codes + 32 * j, from->bits + j / 4 * 32, j % 4 * 2, 3, 0);
        add_bits(b->codes + 32 * j, from->high, j, 1, 2);
    }
}

static void read_q4_k(struct plain_block *b, const struct q4_k_block *from) {
    b->scale = from->scale, b->min = from->min;
    read_k_scales(b, from->scales);
    for (int i = 0; i < SUPER_BLOCK; i += 64) read_nibbles(b->codes + i, from->nibbles + i / 2, 32);
}

static void read_q5_k(struct plain_block *b, const struct q5_k_block *from) {
    b->scale = from->scale, b->min = from->min;
    read_k_scales(b, from->scales);
    for (int i = 0; i < SUPER_BLOCK; i += 64) read_nibbles(b->codes + i, from->nibbles + i / 2, 32);
    for (int j = 0; j < 8; j++) add_bits(b->codes + 32 * j, from->high, j, 1, 4);
}

static void read_q6_k(struct plain_block *b, const struct q6_k_block *from) {
    b->scale = from->scale;
    memcpy(b->scales, from->scales, sizeof b->scales);
    memset(b->codes, 0, SUPER_BLOCK);
    for (int j = 0; j < 8; j++) {
        add_bits(b->codes + 32 * j, from->nibbles + j / 4 * 64 + j % 2 * 32, j % 4 / 2 * 4, 15, 0);
        add_bits(b->codes + 32 * j, from->high + j / 4 * 32, j % 4 * 2, 3, 4);
    }
}

void format_read_block(struct plain_block *b, uint32_t format, const void *from) {
    union { // blocks in a file need not be aligned
        struct q4_0_block q4_0; struct q4_1_block q4_1; struct q5_0_block q5_0; struct q5_1_block q5_1; struct q8_0_block q8_0;
        struct iq4_nl_block iq4_nl; struct q2_k_block q2_k; struct q3_k_block q3_k; struct q4_k_block q4_k; struct q5_k_block q5_k;
        struct q6_k_block q6_k;
    } u;
    memcpy(&u, from, format_block_size(format));
    b->min = 0;
    memset(b->scales, 1, sizeof b->scales);
    memset(b->mins, 0, sizeof b->mins);
    switch (format) {
    case MESHLLM_Q4_0: b->scale = u.q4_0.scale, read_nibbles(b->codes, u.q4_0.nibbles, 16); break;
    case MESHLLM_Q4_1: b->scale = u.q4_1.scale, b->min = u.q4_1.min, read_nibbles(b->codes, u.q4_1.nibbles, 16); break;
    case MESHLLM_Q5_0: b->scale = u.q5_0.scale, read_nibbles(b->codes, u.q5_0.nibbles, 16), add_fifth_bits(b->codes, u.q5_0.high); break;
    case MESHLLM_Q5_1:
        b->scale = u.q5_1.scale, b->min = u.q5_1.min;
        read_nibbles(b->codes, u.q5_1.nibbles, 16), add_fifth_bits(b->codes, u.q5_1.high);
        break;
    case MESHLLM_Q8_0: b->scale = u.q8_0.scale, memcpy(b->codes, u.q8_0.values, MESHLLM_BLOCK); break;
    case MESHLLM_IQ4_NL: b->scale = u.iq4_nl.scale, read_nibbles(b->codes, u.iq4_nl.nibbles, 16); break;
    case MESHLLM_Q2_K: read_q2_k(b, &u.q2_k); break;
    case MESHLLM_Q3_K: read_q3_k(b, &u.q3_k); break;
    case MESHLLM_Q4_K: read_q4_k(b, &u.q4_k); break;
    case MESHLLM_Q5_K: read_q5_k(b, &u.q5_k); break;
    default: read_q6_k(b, &u.q6_k);
    }
}

// --- values ----------------------------------------------------------------------------------------------------------

static int whole_value(uint32_t format, uint8_t code) {
    switch (format) {
    case MESHLLM_Q4_0: return code - 8;
    case MESHLLM_Q5_0: return code - 16;
    case MESHLLM_Q8_0: return (int8_t)code;
    case MESHLLM_IQ4_NL: return iq4_nl_values[code];
    case MESHLLM_Q3_K: return code - 4;
    case MESHLLM_Q6_K: return code - 32;
    default: return code;
    }
}

static void block_values(float *out, uint32_t format, const struct plain_block *b) {
    bool adds_min = format == MESHLLM_Q4_1 || format == MESHLLM_Q5_1; // the others subtract a multiple of it
    float scale = f32_of_f16(b->scale), min = f32_of_f16(b->min);
    for (size_t i = 0, n = format_block_values(format); i < n; i++) {
        out[i] = scale * (float)b->scales[i / 16] * (float)whole_value(format, b->codes[i]) + (adds_min ? min : -(min * (float)b->mins[i / 16]));
    }
}

int meshllm_dequantize_row(uint32_t format, float *out, uint32_t n_cols, const void *row) {
    if (!format_row_size(format, n_cols)) return MESHLLM_BAD_ARGUMENT;
    const uint8_t *p = row; // rows need not be aligned
    size_t values = format_block_values(format), size = format_block_size(format);
    for (uint32_t i = 0; i < n_cols; i += (uint32_t)values, p += size) {
        uint16_t half;
        struct plain_block block;
        memcpy(&half, p, sizeof half);
        if (format == MESHLLM_F32) memcpy(out + i, p, sizeof *out);
        else if (format == MESHLLM_F16) out[i] = f32_of_f16(half);
        else if (format == MESHLLM_BF16) out[i] = f32_of_bf16(half);
        else format_read_block(&block, format, p), block_values(out + i, format, &block);
    }
    return MESHLLM_OK;
}
