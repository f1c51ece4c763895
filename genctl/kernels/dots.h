/* Dot products of codes of 8 bits on each instruction set: codes.c and blocks.c alone use them, so that the other files are the
   same with and without AVX-VNNI. */
#pragma once
#include "lanes.h"

#if defined(__AVX512F__) /* ------------------------------------------------------------------------- AVX-512, VNNI */
IN B shifted(B w) { return _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80)); } /* codes + 128: this dot product wants one unsigned side */
IN I dots(I sum, B w, B x) { return _mm512_dpbusd_epi32(sum, w, x); }
#define SHIFT 128
IN I dotu(I sum, B w, B x) { return _mm512_dpbusd_epi32(sum, w, x); }
#elif defined(__AVX2__) /* -------------------------------------------------------------------- AVX2, FMA; AVX-VNNI */
#ifdef __AVXVNNI__
IN __m256i flipped(__m256i w) { return _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80)); }
IN B shifted(B w) { return EACH(B, flipped(w.a), flipped(w.b)); } /* codes + 128, as with AVX-512 */
#define SHIFT 128
IN I dotu(I sum, B w, B x) { return EACH(I, _mm256_dpbusd_avx_epi32(sum.a, w.a, x.a), _mm256_dpbusd_avx_epi32(sum.b, w.b, x.b)); }
IN I dots(I sum, B w, B x) { return dotu(sum, w, x); }
#else
IN __m256i dots8(__m256i sum, __m256i w, __m256i x) { /* |w| times x with the sign of w: pairs stay below 2^15, as no code is -128 */
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
IN I dots(I sum, B w, B x) { return EACH(I, dots8(sum.a, w.a, x.a), dots8(sum.b, w.b, x.b)); }
IN __m256i dotu8(__m256i sum, __m256i w, __m256i x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1))); }
IN I dotu(I sum, B w, B x) { return EACH(I, dotu8(sum.a, w.a, x.a), dotu8(sum.b, w.b, x.b)); }
#define PAIRS /* of codes of 4 bits: eight times two products stay below 2^15, so they are widened once for a block */
IN I pairs(I sum, B w, B x) { return EACH(I, _mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, x.a)), _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, x.b))); }
IN I wider(I sum) { return EACH(I, _mm256_madd_epi16(sum.a, _mm256_set1_epi16(1)), _mm256_madd_epi16(sum.b, _mm256_set1_epi16(1))); }
#endif
#elif defined(__aarch64__) /* --------------------------------------------------------------------------------- NEON */
IN int32x4_t dots4(int32x4_t sum, int8x16_t w, int8x16_t x) {
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(sum, w, x);
#else
  int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
IN I dots(I sum, B w, B x) { FOUR sum.v[q] = dots4(sum.v[q], w.v[q], x.v[q]); return sum; }
IN I dotu(I sum, B w, B x) { return dots(sum, w, x); } /* codes of 4 bits are positive with a sign, too */
#else
IN I dots(I sum, B w, B x) { SIXTEEN for (int m = 4 * l; m < 4 * l + 4; m++) sum.v[l] += (int32_t)w.v[m] * x.v[m]; return sum; }
IN I dotu(I sum, B w, B x) { return dots(sum, w, x); }
#endif
#ifndef SHIFT /* both sides have a sign */
#define SHIFT 0
IN B shifted(B w) { return w; }
#endif
