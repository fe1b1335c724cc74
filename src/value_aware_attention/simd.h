// Vectors of the compiler's own kind, for rows of numbers that lie next to each other. Native code
// of several modules shares them. A compiler without such instructions splits them by itself.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

template <class T, int BYTES = 32> struct Pack {
  typedef T type __attribute__((vector_size(BYTES)));
  typedef T loose __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
  static constexpr int lanes = BYTES / sizeof(T);
  static type load(const T* p) { return *reinterpret_cast<const loose*>(p); }
  static void store(T* p, type x) { *reinterpret_cast<loose*>(p) = x; }
  static type all(T x) { return x - type{}; }  // a broadcast; type{} + x would be an addition
};

inline int padded(int count, int lanes) { return (count + lanes - 1) / lanes * lanes; }

template <class T, int BYTES = 32> T sum(typename Pack<T, BYTES>::type x) {
  if constexpr (BYTES > 16) {
    typename Pack<T, BYTES / 2>::type low, high;
    std::memcpy(&low, &x, BYTES / 2);
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + BYTES / 2, BYTES / 2);
    return sum<T, BYTES / 2>(low + high);
  } else if constexpr (Pack<T, BYTES>::lanes == 2) {
    return x[0] + x[1];
  } else {
    return (x[0] + x[2]) + (x[1] + x[3]);
  }
}

// exp(x) for x <= 0 with a relative error of 1e-7; 0 below -87, where exp leaves normal numbers.
// x = n log 2 + rest, and exp(rest) is a polynomial of degree 6 (coefficients of Cephes' expf).
template <int BYTES = 32>
typename Pack<float, BYTES>::type exponential(typename Pack<float, BYTES>::type x) {
  using P = Pack<float, BYTES>;
  typedef typename P::type Vec;
  typedef int32_t Bits __attribute__((vector_size(BYTES)));
  const Vec lowest = P::all(-87.0f), magic = P::all(12582912.0f);  // 1.5 * 2^23 rounds to an integer
  const Vec bounded = x < lowest ? lowest : x;  // NaN stays NaN
  const Vec rounded = bounded * P::all(1.44269504f) + magic;
  const Vec n = rounded - magic;
  const Vec rest = bounded - n * P::all(0.693359375f) + n * P::all(2.12194440e-4f);
  Vec y = P::all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                  5.0000001201e-1f})
    y = y * rest + P::all(c);
  y = y * rest * rest + rest + P::all(1.0f);
  const Vec scaled = (Vec)((Bits)y + ((Bits)rounded << 23));
  return x < lowest ? Vec{} : scaled;
}

template <class T> T dot(const T* a, const T* b, int n) {
  using P = Pack<T>;
  typename P::type even{}, odd{};
  int i = 0;
  for (; i + 2 * P::lanes <= n; i += 2 * P::lanes) {
    even += P::load(a + i) * P::load(b + i);
    odd += P::load(a + i + P::lanes) * P::load(b + i + P::lanes);
  }
  if (i < n) even += P::load(a + i) * P::load(b + i);
  return sum<T>(even + odd);
}

}  // namespace
