// Rows of a file -> panels, the layout that the matmul kernels stream. A panel holds R rows. For quantized formats it is a
// run of blocks of 32 columns, each R f16 scales (Q4_1: and R f16 minima), then groups of four bytes of each row in turn:
// byte group g of row r of the file's block stands at (g * R + r) * 4. The same bytes as in the file, transposed.
// For F16 and F32 it is [n_cols][R] values. Rows past the last are zeros. A cut is packed straight into its place.
//
// A panel is written front to back, its R rows read side by side, each loop with a constant R and single moves for copies: 4 to 6
// GB/s on one thread where memcpy reaches 6 to 8; a row after the other reached 2 to 3.5, with R cache lines written at a time.
#include <stdbool.h>
#include <string.h>

#include "blocks.h"
#include "kernels.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

static size_t panel_size(uint32_t panel_rows, uint32_t format, uint32_t n_cols) {
    return panel_rows * format_row_size(format, n_cols); // a transpose: no byte more than the rows had
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

ALWAYS_INLINE void pack_panel(uint8_t *out, uint32_t format, const struct rows *rows, uint32_t n_cols) {
    switch (format) { // constants in each call: a loop of its own for each format
    case MESHLLM_F32: pack_values(out, 4, rows, n_cols); break;
    case MESHLLM_F16: pack_values(out, 2, rows, n_cols); break;
    case MESHLLM_Q4_0: pack_blocks(out, 1, 4, rows, n_cols); break;
    case MESHLLM_Q4_1: pack_blocks(out, 2, 4, rows, n_cols); break;
    case MESHLLM_Q8_0: pack_blocks(out, 1, 8, rows, n_cols); break;
    }
}

static void pack_whole_panel(uint8_t *out, uint32_t format, const uint8_t *first, size_t stride, size_t panel_rows, uint32_t n_cols) {
    switch (panel_rows) { // of the instruction sets; 16 for those to come
    case 1: memcpy(out, first, format_row_size(format, n_cols)); break;
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
