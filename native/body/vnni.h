// Dots of blocks with dpbusd, for the files that have it at their width; see matmul.h. Included after dpbusd(sum, w, a), which takes w as
// unsigned, add_bytes(sum, w, a) for signed w, and body/unpack.h.

ALWAYS_INLINE void dot_blocks(vi *sums, uint32_t format, const uint8_t *groups, size_t w_step, const int8_t *values, size_t a_step, size_t n,
                              size_t first, size_t last) {
    for (size_t i = 0; i < n; i++) sums[i] = vi_set1(0);
    for (size_t g = 0; g < 4; g++)
        for (size_t i = 0; i < n; i++) // group by group, so that weights unpacked for all tokens need no registers of their own
            for (size_t half = first; half < last; half++) {
                const size_t s = g + 4 * half;
                vi w = group_of(groups + i * w_step, format, s), a = four_of(values + i * a_step + 4 * s);
                sums[i] = has_signed_groups(format) ? add_bytes(sums[i], w, a) : dpbusd(sums[i], w, a);
            }
}
