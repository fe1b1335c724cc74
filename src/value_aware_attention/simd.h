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
