/* Which variants this CPU can run, and what this file was built from. Compiled without any instruction beyond the baseline's
   need in the variant that is loaded first. */
#include <string.h>
#ifndef SOURCES
#define SOURCES "unknown"
#endif
const char *built_from(void) { return SOURCES; }

#if defined(__x86_64__)
#include <cpuid.h>
static unsigned long long states(void) { /* registers that the operating system saves */
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (unsigned long long)high << 32 | low;
}
int runs(const char *variant) {
  unsigned a, b, c, d, c1;
  if (!strcmp(variant, "plain")) return 1;
  if (!__get_cpuid(1, &a, &b, &c1, &d) || !(c1 >> 27 & 1)) return 0; /* OSXSAVE */
  const unsigned long long saved = states();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const int avx2 = (saved & 6) == 6 && (c1 >> 28 & 1) && (c1 >> 12 & 1) && (c1 >> 29 & 1) && (b >> 5 & 1) && (b >> 3 & 1) && (b >> 8 & 1); /* AVX, FMA, F16C, AVX2, BMI, BMI2 */
  if (!strcmp(variant, "avx2")) return avx2;
  if (strcmp(variant, "avx512")) return 0;
  return avx2 && (saved & 0xe6) == 0xe6 && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 28 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && (c >> 11 & 1); /* F, DQ, CD, BW, VL, VNNI */
}
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
int runs(const char *variant) { return !strcmp(variant, "neon") || (!strcmp(variant, "dotprod") && (getauxval(AT_HWCAP) >> 20 & 1)); }
#else
int runs(const char *variant) { return !strcmp(variant, "neon") || !strcmp(variant, "dotprod"); }
#endif
#else
int runs(const char *variant) { return !strcmp(variant, "plain"); }
#endif
