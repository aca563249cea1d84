// Rows of a file -> panels, the layout that the matmul kernels stream. A panel holds R rows. For quantized formats it is a run of
// super-blocks of SPAN columns: 32, or 256 for K formats. Each is
//
//     R f16 scales, then (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K) R f16 minima
//     for each 32 columns: n_bytes times R bytes (K: scales and minima, see below), then n_groups times R times four bytes
//
// so that byte group g of row r stands at (g * R + r) * 4. Groups are what dot products take: four nibbles of columns 4g to 4g + 3 (low)
// and 16 + 4g to 16 + 4g + 3 (high); bytes for Q8_0; and before them, planes with the bits above a nibble:
//
//     one bit (Q5, Q3_K's third): bit s of byte p belongs to column 4s + p
//     two bits (Q6_K's upper two, all that Q2_K and Q3_K have but that third): two planes; bits 2t, 2t + 1 of byte p of plane i to
//     column 16i + 4t + p
//
// Bytes of 32 columns: a scale and a minimum (Q4_K, Q5_K); a scale for each 16 (Q6_K, Q3_K); the same with a minimum above (Q2_K).
// For F16, BF16 and F32 a panel is [n_cols][R] values. Rows past the last are zeros. A cut is packed straight into its place.
//
// A panel of a format whose bytes are only moved is written front to back, its R rows read side by side, each loop with a constant R and
// single moves for copies: 4 to 6 GB/s on one thread where memcpy reaches 6 to 8; a row after the other reached 2 to 3.5, with R cache
// lines written at a time.
#include <stdbool.h>
#include <string.h>

#include "blocks.h"
#include "kernels.h"
#include "packing.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

static size_t panel_size(uint32_t panel_rows, uint32_t format, uint32_t n_cols) {
    if (!format_row_size(format, n_cols)) return 0;
    if (format_is_float(format)) return panel_rows * format_row_size(format, n_cols);
    struct packing p = packing_of(format);
    return panel_rows * (n_cols / p.span * packed_row_bytes(p));
}

size_t packed_size(uint32_t panel_rows, uint32_t format, uint32_t n_rows, uint32_t n_cols) {
    return ((size_t)n_rows + panel_rows - 1) / panel_rows * panel_size(panel_rows, format, n_cols);
}

size_t meshllm_packed_size(const struct meshllm_engine *engine, uint32_t format, uint32_t n_rows, uint32_t n_cols) {
    return packed_size(engine->kernels->panel_rows, format, n_rows, n_cols);
}

struct rows { // of a file, stride bytes apart: the first n_rows of a panel of panel_rows; the rest are zeros
    const uint8_t *first;
    size_t stride, n_rows, panel_rows;
};

// Values of size bytes, a column at a time.
ALWAYS_INLINE void pack_values(uint8_t *out, size_t size, const struct rows *rows, uint32_t n_cols) {
    for (uint32_t k = 0; k < n_cols; k++, out += rows->panel_rows * size)
        for (size_t r = 0; r < rows->n_rows; r++) memcpy(out + r * size, rows->first + r * rows->stride + k * size, size);
}

// Blocks of n_heads f16 numbers and n_groups of four bytes.
ALWAYS_INLINE void pack_blocks(uint8_t *out, size_t n_heads, size_t n_groups, const struct rows *rows, uint32_t n_cols) {
    size_t block_size = 2 * n_heads + 4 * n_groups;
    const uint8_t *block = rows->first;
    for (uint32_t k = 0; k < n_cols; k += MESHLLM_BLOCK, block += block_size) {
        for (size_t i = 0; i < n_heads; i++, out += 2 * rows->panel_rows)
            for (size_t r = 0; r < rows->n_rows; r++) memcpy(out + 2 * r, block + r * rows->stride + 2 * i, 2);
        for (size_t g = 0; g < n_groups; g++, out += 4 * rows->panel_rows)
            for (size_t r = 0; r < rows->n_rows; r++) memcpy(out + 4 * r, block + r * rows->stride + 2 * n_heads + 4 * g, 4);
    }
}

// --- formats whose bits are put in another order

enum { EACH = 0x01010101 }; // byte of a word of four codes

// The groups of 32 codes, planes first. Four codes at a time: of none a bit reaches another byte.
ALWAYS_INLINE void make_groups(uint32_t groups[], uint32_t format, const uint8_t *codes) {
    uint32_t four[8];
    memcpy(four, codes, sizeof four);
    int two = format == MESHLLM_Q6_K ? 4 : 0, at = 0; // where the bits of a plane of two stand in a code
    bool has_two = format == MESHLLM_Q6_K || format == MESHLLM_Q3_K || format == MESHLLM_Q2_K;
    int one = format == MESHLLM_Q3_K ? 2 : format == MESHLLM_Q5_0 || format == MESHLLM_Q5_1 || format == MESHLLM_Q5_K ? 4 : 0;
    for (int i = 0; i < 2 && has_two; i++, at++) {
        groups[at] = 0;
        for (int t = 0; t < 4; t++) groups[at] |= (four[4 * i + t] >> two & 3 * EACH) << 2 * t;
    }
    if (one) {
        groups[at] = 0;
        for (int s = 0; s < 8; s++) groups[at] |= (four[s] >> one & EACH) << s;
        at++;
    }
    if (format == MESHLLM_Q3_K || format == MESHLLM_Q2_K) return;
    for (int g = 0; g < 4; g++) groups[at + g] = (four[g] & 15 * EACH) | (four[4 + g] & 15 * EACH) << 4;
}

ALWAYS_INLINE void make_bytes(uint8_t bytes[2], uint32_t format, const struct plain_block *b, size_t s) {
    const int8_t *scales = b->scales + 2 * s;
    const uint8_t *mins = b->mins + 2 * s;
    if (format == MESHLLM_Q2_K) bytes[0] = (uint8_t)(scales[0] | mins[0] << 4), bytes[1] = (uint8_t)(scales[1] | mins[1] << 4);
    else bytes[0] = (uint8_t)scales[0], bytes[1] = format == MESHLLM_Q4_K || format == MESHLLM_Q5_K ? mins[0] : (uint8_t)scales[1];
}

ALWAYS_INLINE void pack_super_blocks(uint8_t *out, uint32_t format, const struct rows *rows, uint32_t n_cols) {
    const struct packing p = packing_of(format);
    size_t R = rows->panel_rows, sub_size = R * packed_sub_bytes(p);
    for (size_t r = 0; r < rows->n_rows; r++) {
        const uint8_t *block = rows->first + r * rows->stride;
        uint8_t *to = out;
        for (uint32_t k = 0; k < n_cols; k += p.span, block += format_block_size(format), to += R * packed_row_bytes(p)) {
            struct plain_block b;
            format_read_block(&b, format, block);
            memcpy(to + 2 * r, &b.scale, 2);
            if (p.n_heads == 2) memcpy(to + 2 * (R + r), &b.min, 2);
            for (size_t s = 0; s < p.span / MESHLLM_BLOCK; s++) {
                uint8_t *sub = to + 2 * p.n_heads * R + s * sub_size, bytes[2];
                uint32_t groups[8];
                make_bytes(bytes, format, &b, s);
                make_groups(groups, format, b.codes + s * MESHLLM_BLOCK);
                for (size_t i = 0; i < p.n_bytes; i++) sub[i * R + r] = bytes[i];
                for (size_t g = 0; g < p.n_groups; g++) memcpy(sub + p.n_bytes * R + 4 * (g * R + r), groups + g, 4);
            }
        }
    }
}

ALWAYS_INLINE void pack_panel(uint8_t *out, uint32_t format, const struct rows *rows, uint32_t n_cols) {
    switch (format) { // constants in each call: a loop of its own for each format
    case MESHLLM_F32: pack_values(out, 4, rows, n_cols); break;
    case MESHLLM_F16: case MESHLLM_BF16: pack_values(out, 2, rows, n_cols); break;
    case MESHLLM_Q4_0: case MESHLLM_IQ4_NL: pack_blocks(out, 1, 4, rows, n_cols); break;
    case MESHLLM_Q4_1: pack_blocks(out, 2, 4, rows, n_cols); break;
    case MESHLLM_Q8_0: pack_blocks(out, 1, 8, rows, n_cols); break;
    case MESHLLM_Q5_0: pack_super_blocks(out, MESHLLM_Q5_0, rows, n_cols); break;
    case MESHLLM_Q5_1: pack_super_blocks(out, MESHLLM_Q5_1, rows, n_cols); break;
    case MESHLLM_Q2_K: pack_super_blocks(out, MESHLLM_Q2_K, rows, n_cols); break;
    case MESHLLM_Q3_K: pack_super_blocks(out, MESHLLM_Q3_K, rows, n_cols); break;
    case MESHLLM_Q4_K: pack_super_blocks(out, MESHLLM_Q4_K, rows, n_cols); break;
    case MESHLLM_Q5_K: pack_super_blocks(out, MESHLLM_Q5_K, rows, n_cols); break;
    default: pack_super_blocks(out, MESHLLM_Q6_K, rows, n_cols);
    }
}

static void pack_whole_panel(uint8_t *out, uint32_t format, const uint8_t *first, size_t stride, size_t panel_rows, uint32_t n_cols) {
    switch (panel_rows) { // of the instruction sets; 16 for those to come
    case 1: pack_panel(out, format, &(struct rows){first, stride, 1, 1}, n_cols); break;
    case 4: pack_panel(out, format, &(struct rows){first, stride, 4, 4}, n_cols); break;
    case 8: pack_panel(out, format, &(struct rows){first, stride, 8, 8}, n_cols); break;
    case 16: pack_panel(out, format, &(struct rows){first, stride, 16, 16}, n_cols); break;
    default: pack_panel(out, format, &(struct rows){first, stride, panel_rows, panel_rows}, n_cols);
    }
}

int meshllm_pack(const struct meshllm_engine *engine, void *packed, uint32_t format, uint32_t row, uint32_t n_rows, uint32_t col,
                 uint32_t n_cols, uint32_t file_cols, size_t size, const void *tensor) {
    size_t panel_rows = engine->kernels->panel_rows;
    size_t file_row = format_row_size(format, file_cols), skipped = format_row_size(format, col);
    bool aligned = file_row && (!col || skipped) && (!n_cols || format_row_size(format, n_cols));
    if (!aligned || col > file_cols || n_cols > file_cols - col || ((size_t)row + n_rows) > size / file_row) return MESHLLM_BAD_ARGUMENT;
    size_t panel = panel_size((uint32_t)panel_rows, format, n_cols), whole = n_rows / panel_rows, rest = n_rows % panel_rows;
    const uint8_t *from = (const uint8_t *)tensor + row * file_row + skipped;
    uint8_t *out = packed;
    for (size_t i = 0; i < whole; i++, out += panel, from += panel_rows * file_row)
        pack_whole_panel(out, format, from, file_row, panel_rows, n_cols);
    if (rest) {
        memset(out, 0, panel);
        pack_panel(out, format, &(struct rows){from, file_row, rest, panel_rows}, n_cols);
    }
    return MESHLLM_OK;
}
