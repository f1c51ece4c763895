/* How two vectors of 32 bfloat16 numbers are multiplied, and how the sums of a chain are added up, on each instruction set.

   The order is one that vdpbf16ps and tdpbf16ps can follow. A chain has 16 lanes; lane l takes pair l of each vector, its
   second number before its first, each by a fused multiplication. After BLOCK numbers lanes 2m and 2m + 1 are added, and
   these eight are added to the output in turn. A chain begins at 0. As in those instructions, numbers below 2^-126 are 0. */
#pragma once
#include "lanes.h"

#define BLOCK 256

#if defined(__AVX2__)
typedef __m128 Q; /* sums of four outputs */
IN Q nothing(void) { return _mm_setzero_ps(); }
IN void stq(float *p, Q v) { _mm_storeu_ps(p, v); }
#endif
#if defined(__AVX512F__)
IN F second(B v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int32_t)0xffff0000))); }
IN F first(B v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
#define NEIGHBOURS(a, b) add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd))
#define TAKE(q) sum = _mm_add_ps(_mm_add_ps(sum, _mm512_extractf32x4_ps(even, q)), _mm512_extractf32x4_ps(odd, q))
IN Q fold(Q sum, F a, F b, F c, F d) {
  const F ab = NEIGHBOURS(a, b), cd = NEIGHBOURS(c, d), even = _mm512_shuffle_ps(ab, cd, 0x88), odd = _mm512_shuffle_ps(ab, cd, 0xdd);
  TAKE(0);
  TAKE(1);
  TAKE(2);
  TAKE(3);
  return sum;
}
#elif defined(__AVX2__)
IN F second(B v) { const __m256i m = _mm256_set1_epi32((int32_t)0xffff0000); return EACH(F, _mm256_castsi256_ps(_mm256_and_si256(v.a, m)), _mm256_castsi256_ps(_mm256_and_si256(v.b, m))); }
IN F first(B v) { return EACH(F, _mm256_castsi256_ps(_mm256_slli_epi32(v.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(v.b, 16))); }
#define NEIGHBOURS(a, b) _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd))
IN Q fold8(Q sum, __m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = NEIGHBOURS(a, b), cd = NEIGHBOURS(c, d), even = _mm256_shuffle_ps(ab, cd, 0x88), odd = _mm256_shuffle_ps(ab, cd, 0xdd);
  sum = _mm_add_ps(_mm_add_ps(sum, _mm256_castps256_ps128(even)), _mm256_castps256_ps128(odd));
  return _mm_add_ps(_mm_add_ps(sum, _mm256_extractf128_ps(even, 1)), _mm256_extractf128_ps(odd, 1));
}
IN Q fold(Q sum, F a, F b, F c, F d) { return fold8(fold8(sum, a.a, b.a, c.a, d.a), a.b, b.b, c.b, d.b); }
#elif defined(__aarch64__)
typedef float32x4_t Q;
IN F second(B v) { F r; FOUR r.v[q] = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s8(v.v[q]), vdupq_n_u32(0xffff0000))); return r; }
IN F first(B v) { F r; FOUR r.v[q] = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_s8(v.v[q]), 16)); return r; }
IN Q nothing(void) { return vdupq_n_f32(0); }
IN void stq(float *p, Q v) { vst1q_f32(p, v); }
IN Q fold(Q sum, F a, F b, F c, F d) {
  FOUR {
    const float32x4_t ab = vpaddq_f32(a.v[q], b.v[q]), cd = vpaddq_f32(c.v[q], d.v[q]);
    sum = vaddq_f32(vaddq_f32(sum, vuzp1q_f32(ab, cd)), vuzp2q_f32(ab, cd));
  }
  return sum;
}
#else
typedef struct { float v[4]; } Q;
IN F halves(B v, int up) { F r; SIXTEEN { uint32_t u; memcpy(&u, v.v + 4 * l, 4); u = up ? u & 0xffff0000 : u << 16; memcpy(r.v + l, &u, 4); } return r; }
IN F second(B v) { return halves(v, 1); }
IN F first(B v) { return halves(v, 0); }
IN Q nothing(void) { return (Q){{0, 0, 0, 0}}; }
IN void stq(float *p, Q v) { memcpy(p, &v, 16); }
IN Q fold(Q sum, F a, F b, F c, F d) {
  for (int m = 0; m < 16; m += 2) {
    sum.v[0] += a.v[m] + a.v[m + 1];
    sum.v[1] += b.v[m] + b.v[m + 1];
    sum.v[2] += c.v[m] + c.v[m + 1];
    sum.v[3] += d.v[m] + d.v[m + 1];
  }
  return sum;
}
#endif
#ifdef __AVX512BF16__
#define HAS_PAIRS 1
IN F dot(F sum, B w, B x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
#else
#define HAS_PAIRS 0
IN F dot(F sum, B w, B x) { return (void)w, (void)x, sum; } /* of no use: code for pairs is left out */
#endif

/* Numbers below 2^-126 are read and written as 0, as those instructions do. */
#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned Mode;
IN Mode tiny_is_zero(void) {
  const Mode before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  return before;
}
IN void as_before(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t Mode;
IN Mode tiny_is_zero(void) {
  Mode before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | 1 << 24) : "memory");
  return before;
}
IN void as_before(Mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
typedef int Mode;
IN Mode tiny_is_zero(void) { return 0; }
IN void as_before(Mode mode) { (void)mode; }
#endif
