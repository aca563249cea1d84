// Packing: panels hold the file's bytes where pack.c says, cuts are the same as packing a smaller tensor, and what does not fit
// is refused without a byte written. Buffers end at guard pages.
#include "blocks.h"
#include "check.h"
#include "kernels.h"

// The first have their file's bytes in another order and no other.
static const uint32_t formats[] = {MESHLLM_F32, MESHLLM_F16, MESHLLM_BF16, MESHLLM_Q4_0, MESHLLM_Q4_1, MESHLLM_Q8_0, MESHLLM_IQ4_NL,
                                   MESHLLM_Q5_0, MESHLLM_Q5_1, MESHLLM_Q2_K, MESHLLM_Q3_K, MESHLLM_Q4_K, MESHLLM_Q5_K, MESHLLM_Q6_K};
enum { N_FORMATS = sizeof formats / sizeof *formats, N_MOVED = 7 };

static uint32_t unit_of(uint32_t format) { return format_is_float(format) ? 32 : (uint32_t)format_block_values(format); }

static struct meshllm_engine engine_of(struct kernels *kernels, uint32_t panel_rows) {
    *kernels = (struct kernels){.panel_rows = panel_rows};
    return (struct meshllm_engine){kernels, NULL};
}

// Where byte i of a row stands in its panel, counted from the panel's first byte; r: the row in the panel.
static size_t place(uint32_t format, size_t panel_rows, size_t r, size_t i) {
    if (format == MESHLLM_F32) return (i / 4 * panel_rows + r) * 4 + i % 4;
    if (format_is_float(format)) return (i / 2 * panel_rows + r) * 2 + i % 2;
    size_t block = format_block_size(format), start = i / block * block * panel_rows, at = i % block;
    size_t head = format == MESHLLM_Q4_1 ? 4 : 2; // scale, and minimum
    if (at < head) return start + (at / 2 * panel_rows + r) * 2 + at % 2;
    return start + head * panel_rows + ((at - head) / 4 * panel_rows + r) * 4 + (at - head) % 4;
}

static void check_cut(uint32_t panel_rows, uint32_t format, const struct guarded *tensor, uint32_t file_cols, uint32_t row, uint32_t n_rows,
                      uint32_t col, uint32_t n_cols) {
    struct kernels kernels;
    struct meshllm_engine engine = engine_of(&kernels, panel_rows);
    size_t row_size = format_row_size(format, n_cols), n_panels = (n_rows + panel_rows - 1) / panel_rows;
    struct guarded packed = guarded_new(meshllm_packed_size(&engine, format, n_rows, n_cols));
    CHECK(packed.size == n_panels * panel_rows * row_size);
    CHECK(!meshllm_pack(&engine, packed.data, format, row, n_rows, col, n_cols, file_cols, tensor->size, tensor->data));
    for (size_t p = 0; p < n_panels * panel_rows; p++)
        for (size_t i = 0; i < row_size; i++) {
            const uint8_t *from = tensor->data + (row + p) * format_row_size(format, file_cols) + format_row_size(format, col) + i;
            uint8_t got = packed.data[p / panel_rows * panel_rows * row_size + place(format, panel_rows, p % panel_rows, i)];
            CHECK(got == (p < n_rows ? *from : 0), "format %u, panels of %u, row %zu, byte %zu", format, panel_rows, p, i);
        }
    guarded_free(&packed);
}

// A cut is what packing a tensor of nothing but the cut gives.
static void check_small(uint32_t panel_rows, uint32_t format, const struct guarded *tensor, uint32_t file_cols, uint32_t row, uint32_t n_rows,
                        uint32_t col, uint32_t n_cols) {
    struct kernels kernels;
    struct meshllm_engine engine = engine_of(&kernels, panel_rows);
    size_t row_size = format_row_size(format, n_cols);
    struct guarded cut = guarded_new(meshllm_packed_size(&engine, format, n_rows, n_cols)), whole = guarded_new(cut.size);
    struct guarded small = guarded_new(n_rows * row_size);
    for (uint32_t r = 0; r < n_rows; r++)
        memcpy(small.data + r * row_size, tensor->data + (row + r) * format_row_size(format, file_cols) + format_row_size(format, col), row_size);
    CHECK(!meshllm_pack(&engine, cut.data, format, row, n_rows, col, n_cols, file_cols, tensor->size, tensor->data));
    CHECK(!n_cols || !meshllm_pack(&engine, whole.data, format, 0, n_rows, 0, n_cols, n_cols, small.size, small.data));
    CHECK(!memcmp(cut.data, whole.data, cut.size), "format %u, panels of %u", format, panel_rows);
    guarded_free(&cut), guarded_free(&whole), guarded_free(&small);
}

static void check_format(uint32_t format, bool moved, uint64_t *seed) {
    enum { ROWS = 21 };
    uint32_t unit = unit_of(format), cols = 4 * unit;
    struct guarded tensor = guarded_new(ROWS * format_row_size(format, cols));
    void (*check)(uint32_t, uint32_t, const struct guarded *, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) = moved ? check_cut : check_small;
    for (size_t i = 0; i < tensor.size; i++) tensor.data[i] = (uint8_t)noise(seed);
    for (uint32_t panel_rows = 1; panel_rows <= 16; panel_rows *= 2) {
        check(panel_rows, format, &tensor, cols, 0, ROWS, 0, cols);
        check(panel_rows, format, &tensor, cols, 3, 17, unit, 2 * unit);
        check(panel_rows, format, &tensor, cols, ROWS - 1, 1, cols - unit, unit);
        check(panel_rows, format, &tensor, cols, ROWS, 0, 0, cols);
        check(panel_rows, format, &tensor, cols, 0, 5, 2 * unit, 0);
    }
    guarded_free(&tensor);
}

static void check_refusals(uint32_t format) {
    struct kernels kernels;
    struct meshllm_engine engine = engine_of(&kernels, 8);
    uint32_t unit = unit_of(format), cols = 2 * unit, huge = UINT32_MAX / unit * unit;
    size_t size = 4 * format_row_size(format, cols);
    uint8_t *tensor = calloc(1, size), out[1] = {CANARY};
    const uint32_t wrong[][5] = { // row, n_rows, col, n_cols, file_cols of a tensor of 4 rows
        {0, 5, 0, cols, cols},        {4, 1, 0, cols, cols},     {UINT32_MAX, 1, 0, cols, cols}, {1, UINT32_MAX, 0, cols, cols}, {0, 4, unit, cols, cols},
        {0, 4, 3 * unit, 0, cols},    {0, 4, 0, 2 * cols, cols}, {0, 1, huge, cols, cols},       {0, 1, cols, huge, cols},       {0, 4, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(meshllm_pack(&engine, out, format, wrong[i][0], wrong[i][1], wrong[i][2], wrong[i][3], wrong[i][4], size, tensor) ==
                  MESHLLM_BAD_ARGUMENT && *out == CANARY, "format %u, case %zu", format, i);
    CHECK(meshllm_pack(&engine, out, 9, 0, 1, 0, 32, 32, size, tensor) == MESHLLM_BAD_ARGUMENT, "an unknown format");
    if (!format_is_float(format)) {
        CHECK(meshllm_pack(&engine, out, format, 0, 1, unit / 2, unit, cols, size, tensor) == MESHLLM_BAD_ARGUMENT, "a cut inside a block");
        CHECK(meshllm_pack(&engine, out, format, 0, 1, 0, unit + unit / 2, cols, size, tensor) == MESHLLM_BAD_ARGUMENT, "a cut inside a block");
        CHECK(!meshllm_packed_size(&engine, format, 1, unit + 1));
    }
    free(tensor);
}

// One row ends at a guard page and starts at any address; the values are the format's.
static void check_dequantize(void) {
    struct q4_0_block q4_0 = {f16_of_f32(0.5f), {0}};
    struct q4_1_block q4_1 = {f16_of_f32(0.5f), f16_of_f32(-2), {0}};
    struct q8_0_block q8_0 = {f16_of_f32(0.25f), {0}};
    for (int i = 0; i < 16; i++) q4_0.nibbles[i] = q4_1.nibbles[i] = (uint8_t)(i | (15 - i) << 4);
    for (int i = 0; i < 32; i++) q8_0.values[i] = (int8_t)(i - 128);
    const void *blocks[] = {&q4_0, &q4_1, &q8_0};
    for (int f = 0; f < 3; f++) {
        uint32_t format = formats[3 + f];
        struct guarded row = guarded_new(format_row_size(format, 32)), out = guarded_new(32 * 4);
        memcpy(row.data, blocks[f], row.size);
        CHECK(!meshllm_dequantize_row(format, (float *)out.data, 32, row.data));
        for (int i = 0; i < 32; i++) {
            int nibble = i < 16 ? i : 31 - i;
            float expected = f == 0 ? 0.5f * (float)(nibble - 8) : f == 1 ? 0.5f * (float)nibble - 2 : 0.25f * (float)(i - 128);
            CHECK(((float *)out.data)[i] == expected, "format %u, value %d", format, i);
        }
        CHECK(meshllm_dequantize_row(format, (float *)out.data, 31, row.data) == MESHLLM_BAD_ARGUMENT);
        guarded_free(&row);
        guarded_free(&out);
    }
    float value;
    CHECK(meshllm_dequantize_row(99, &value, 1, &value) == MESHLLM_BAD_ARGUMENT);
}

int main(void) {
    uint64_t seed = 3;
    for (size_t f = 0; f < N_FORMATS; f++) {
        check_format(formats[f], f < N_MOVED, &seed);
        check_refusals(formats[f]);
    }
    check_dequantize();
    puts("pack: every byte in its place");
    return 0;
}
