// Rows of a file -> panels, the layout that the matmul kernels stream. A panel holds R rows. For quantized formats it is a
// run of blocks of 32 columns, each R f16 scales (Q4_1: and R f16 minima), then groups of four bytes of each row in turn:
// byte group g of row r of the file's block stands at (g * R + r) * 4. The same bytes as in the file, transposed.
// For F16 and F32 it is [n_cols][R] values. Rows past the last are zeros. A cut is packed straight into its place.
#include <stdbool.h>
#include <string.h>

#include "blocks.h"
#include "kernels.h"

static size_t panel_size(uint32_t panel_rows, uint32_t format, uint32_t n_cols) {
    return panel_rows * format_row_size(format, n_cols); // a transpose: no byte more than the rows had
}

size_t packed_size(uint32_t panel_rows, uint32_t format, uint32_t n_rows, uint32_t n_cols) {
    return ((size_t)n_rows + panel_rows - 1) / panel_rows * panel_size(panel_rows, format, n_cols);
}

size_t meshllm_packed_size(const struct meshllm_engine *engine, uint32_t format, uint32_t n_rows, uint32_t n_cols) {
    return packed_size(engine->kernels->panel_rows, format, n_rows, n_cols);
}

static void pack_values(uint8_t *panel, size_t size, size_t panel_rows, size_t r, const uint8_t *row, uint32_t n_cols) {
    for (uint32_t k = 0; k < n_cols; k++) memcpy(panel + (k * panel_rows + r) * size, row + k * size, size);
}

static void pack_blocks(uint8_t *panel, uint32_t format, size_t panel_rows, size_t r, const uint8_t *row, uint32_t n_cols) {
    size_t block_size = format_block_size(format), n_heads = format == MESHLLM_Q4_1 ? 2 : 1;
    size_t n_groups = (block_size - 2 * n_heads) / 4;
    for (uint32_t k = 0; k < n_cols; k += MESHLLM_BLOCK, row += block_size, panel += block_size * panel_rows) {
        for (size_t i = 0; i < n_heads; i++) memcpy(panel + (i * panel_rows + r) * 2, row + 2 * i, 2);
        uint8_t *groups = panel + 2 * n_heads * panel_rows;
        for (size_t g = 0; g < n_groups; g++) memcpy(groups + (g * panel_rows + r) * 4, row + 2 * n_heads + 4 * g, 4);
    }
}

int meshllm_pack(const struct meshllm_engine *engine, void *packed, uint32_t format, uint32_t row, uint32_t n_rows, uint32_t col,
                 uint32_t n_cols, uint32_t file_cols, size_t size, const void *tensor) {
    size_t panel_rows = engine->kernels->panel_rows;
    size_t file_row = format_row_size(format, file_cols), skipped = format_row_size(format, col);
    bool aligned = file_row && (!col || skipped) && (!n_cols || format_row_size(format, n_cols));
    if (!aligned || col > file_cols || n_cols > file_cols - col || ((size_t)row + n_rows) > size / file_row) return MESHLLM_BAD_ARGUMENT;
    size_t panel = panel_size((uint32_t)panel_rows, format, n_cols);
    uint8_t *out = packed;
    if (n_rows % panel_rows) memset(out + n_rows / panel_rows * panel, 0, panel);
    for (uint32_t i = 0; i < n_rows; i++) {
        const uint8_t *from = (const uint8_t *)tensor + ((size_t)row + i) * file_row + skipped;
        uint8_t *to = out + i / panel_rows * panel;
        if (format == MESHLLM_F32) pack_values(to, 4, panel_rows, i % panel_rows, from, n_cols);
        else if (format == MESHLLM_F16) pack_values(to, 2, panel_rows, i % panel_rows, from, n_cols);
        else pack_blocks(to, format, panel_rows, i % panel_rows, from, n_cols);
    }
    return MESHLLM_OK;
}
