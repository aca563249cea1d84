// exp(x) for vectors: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree 6 in r (Cephes expf's), times 2^n.
// Error under 2 ulp; below -87 it gives 0, above 88.7 infinity; NaN stays NaN. An ISA with a scalar vf defines VF_EXP itself.
#ifndef VF_EXP
ALWAYS_INLINE vf vf_exp(vf x) {
    vf clamped = vf_min(vf_max(x, vf_set1(-87.0f)), vf_set1(88.72f));
    vf n = vf_round(vf_mul(clamped, vf_set1(1.44269504f)));
    vf r = vf_fma(n, vf_set1(-0.693359375f), clamped);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_add(vf_fma(p, vf_mul(r, r), r), vf_set1(1));
    vf half = vf_pow2(vf_sub(n, vf_set1(1))); // 2^128 is no float: multiply by 2 last
    vf y = vf_mul(vf_mul(p, half), vf_set1(2));
    return vf_select_special(x, y);
}
#endif
