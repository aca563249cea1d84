// Group s of 32 columns of a packed panel: columns 4s to 4s + 3 of each of its rows, as bytes; pack.c tells the layout. Included by an ISA
// file between its primitives and its dot_blocks. Unsigned formats have an offset that leaves through the activations' sums.

ALWAYS_INLINE bool has_signed_groups(uint32_t format) {
    return format == MESHLLM_Q8_0 || format == MESHLLM_IQ4_NL || format == MESHLLM_Q6_K || format == MESHLLM_Q3_K;
}

// The bits of a plane that belong to group s, moved to bit `to` of each byte; width: 1 or 2 bits a column.
ALWAYS_INLINE vi plane_bits(const uint8_t *plane, size_t s, size_t width, size_t to) {
    size_t from = s * width;
    vi bits = vi_load(plane);
    bits = from < to ? vi_shift_left(bits, (int)(to - from)) : vi_shift_right(bits, (int)(from - to));
    return vi_and(bits, vi_set1_bytes((uint8_t)((width == 1 ? 1 : 3) << to)));
}

ALWAYS_INLINE vi nibble_group(const uint8_t *groups, size_t s) {
    vi both = vi_load(groups + 4 * LANES * (s % 4));
    return vi_and(s < 4 ? both : vi_shift_right(both, 4), vi_set1_bytes(15));
}

ALWAYS_INLINE vi group_of(const uint8_t *groups, uint32_t format, size_t s) {
    const size_t plane = 4 * LANES;
    switch (format) {
    case MESHLLM_Q8_0: return vi_load(groups + plane * s);
    case MESHLLM_Q5_0: case MESHLLM_Q5_1: case MESHLLM_Q5_K: return vi_or(nibble_group(groups + plane, s), plane_bits(groups, s, 1, 4));
    case MESHLLM_Q6_K:
        return vi_sub_bytes(vi_or(nibble_group(groups + 2 * plane, s), plane_bits(groups + s / 4 * plane, s % 4, 2, 4)), vi_set1_bytes(32));
    case MESHLLM_Q3_K:
        return vi_sub_bytes(vi_or(plane_bits(groups + s / 4 * plane, s % 4, 2, 0), plane_bits(groups + 2 * plane, s, 1, 2)), vi_set1_bytes(4));
    case MESHLLM_Q2_K: return plane_bits(groups + s / 4 * plane, s % 4, 2, 0);
    case MESHLLM_IQ4_NL: return vi_lookup(nibble_group(groups, s), iq4_nl_values);
    default: return nibble_group(groups, s);
    }
}
