// Attention of a few later tokens over all keys that a layer's caches hold, in one call: the
// compiled twin of `KeptLayer.attend` in kept_layer.py. later_token.py lays out the tensors.
//
// A cache may hold keys in two places: the kept ones in its pages, which lie one after another, and
// the later ones in a buffer with room. Up to four queries share one pass over the keys.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "../simd.h"

namespace {

struct Call {
  const float* query;                        // (texts, heads * groups, rows, dim), by strides
  const float *key, *value;                  // (caches, room, dim) and (caches, room, width)
  const float* bias;                         // (caches, slots) of the first keys, or null
  const float *page_key, *page_value;        // rows of all caches, or null
  const float* page_bias;                    // a number for each row, or null
  const int64_t* page_spans;                 // (2, caches) where rows begin, and their number
  const bool* visible;                       // of later keys, by strides, or null
  float* output;                             // (texts, rows, heads * groups, width)
  int64_t query_strides[3];                  // of a text, a query head and a row
  int64_t visible_strides[4];                // and of a later key
  int64_t key_strides[2], value_strides[2];  // of a text and a head
  int64_t texts, heads, groups, rows, dim, width;
  int64_t slots;                             // keys before the later ones, in the same buffer
  int64_t first;                             // later keys before those of these queries
  int64_t threads;
  float scale;
};

static_assert(sizeof(Call) == SIZE_OF_CALL, "later_token.py lays it out otherwise");

using P = Pack<float>;
typedef P::type Vec;
constexpr int64_t LANES = P::lanes;

inline int64_t whole(int64_t count) { return padded(static_cast<int>(count), P::lanes); }

// ---- one block of Q queries of a cache ----------------------------------------------------------

struct Keys {
  const float *key, *value, *bias;
  int64_t count, biased;  // the first `biased` keys have a bias
};

constexpr int64_t TILE = 256;  // keys whose weighted values are summed before they join the total

// out[i * stride + j] = scale <q_i, key_j> of J keys
template <int Q, int J>
inline void products(const float* const* q, const float* key, int64_t dim, float scale, float* out,
                     int64_t stride) {
  Vec sums[J][Q] = {};
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) {
    Vec x[Q];
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) x[i] = P::load(q[i] + d);
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
      const Vec k = P::load(key + j * dim + d);
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) sums[j][i] += k * x[i];
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) {
      float product = sum<float>(sums[j][i]);
      for (int64_t rest = d; rest < dim; ++rest) product += key[j * dim + rest] * q[i][rest];
      out[i * stride + j] = product * scale;
    }
}

template <int Q>
void score(const float* const* q, const Keys& keys, int64_t dim, float scale, float* out,
           int64_t stride) {
  constexpr int J = Q == 1 ? 8 : Q == 4 ? 2 : 4;  // as many sums as there are registers
  int64_t j = 0;
  for (; j + J <= keys.count; j += J)
    products<Q, J>(q, keys.key + j * dim, dim, scale, out + j, stride);
  for (; j < keys.count; ++j)
    products<Q, 1>(q, keys.key + j * dim, dim, scale, out + j, stride);
  for (int i = 0; i < Q; ++i) {
    for (int64_t b = 0; keys.bias && b < keys.biased; ++b) out[i * stride + b] += keys.bias[b];
    for (int64_t k = keys.count; k < whole(keys.count); ++k) out[i * stride + k] = -INFINITY;
  }
}

// total[i * width + d] += sum_j weight[i * stride + j] value[j * width + d] of W vectors
template <int Q, int W>
inline void add_values(const float* weight, int64_t stride, const float* value, int64_t keys,
                       int64_t width, float* total) {
  Vec sums[Q][W] = {};
  for (int64_t j = 0; j < keys; ++j) {
    Vec w[Q];
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) w[i] = P::all(weight[i * stride + j]);
#pragma GCC unroll 8
    for (int n = 0; n < W; ++n) {
      const Vec v = P::load(value + j * width + n * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) sums[i][n] += w[i] * v;
    }
  }
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < W; ++n) {
      float* p = total + i * width + n * LANES;
      P::store(p, P::load(p) + sums[i][n]);
    }
}

template <int Q>
void weigh(const float* weight, int64_t stride, const float* value, int64_t keys, int64_t width,
           float* total) {
  int64_t d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES)
    add_values<Q, 4>(weight, stride, value + d, keys, width, total + d);
  for (; d + LANES <= width; d += LANES)
    add_values<Q, 1>(weight, stride, value + d, keys, width, total + d);
  for (; d < width; ++d)
    for (int i = 0; i < Q; ++i) {
      float rest = 0;
      for (int64_t j = 0; j < keys; ++j) rest += weight[i * stride + j] * value[j * width + d];
      total[i * width + d] += rest;
    }
}

// The largest of padded scores; 0 if every key is hidden
inline float largest(const float* scores, int64_t count) {
  Vec most = P::all(-INFINITY);
  for (int64_t k = 0; k < count; k += LANES) {
    const Vec x = P::load(scores + k);
    most = x > most ? x : most;
  }
  float result = most[0];
  for (int lane = 1; lane < LANES; ++lane) result = std::max(result, most[lane]);
  return result == -INFINITY ? 0.0f : result;
}

// Replaces padded scores by their weights; returns the sum of these
inline float weights(float* scores, int64_t count, float most) {
  Vec total{};
  for (int64_t k = 0; k < count; k += LANES) {
    const Vec w = exponential(P::load(scores + k) - P::all(most));
    P::store(scores + k, w);
    total += w;
  }
  return sum<float>(total);
}

class Cache {
 public:
  Cache(const Call& call, int64_t number, std::vector<float>& scratch)
      : s_(call), text_(number / call.heads), head_(number % call.heads), scratch_(scratch) {
    if (s_.page_key) {
      const int64_t row = s_.page_spans[number];
      const int64_t count = s_.page_spans[call.texts * call.heads + number];
      places_[0] = {s_.page_key + row * s_.dim, s_.page_value + row * s_.width,
                    s_.page_bias ? s_.page_bias + row : nullptr, count, count};
    }
    places_[1] = {s_.key + text_ * s_.key_strides[0] + head_ * s_.key_strides[1],
                  s_.value + text_ * s_.value_strides[0] + head_ * s_.value_strides[1],
                  s_.bias ? s_.bias + number * s_.slots : nullptr, 0, s_.slots};
  }

  void run() {
    const int64_t queries = s_.groups * s_.rows;
    int64_t q = 0;
    for (; q + 4 <= queries && queries - q != 5 && queries - q != 6; q += 4) block<4>(q);
    for (; q + 3 <= queries; q += 3) block<3>(q);
    if (queries - q == 2) block<2>(q);
    if (queries - q == 1) block<1>(q);
  }

 private:
  int64_t head_of(int64_t query) const { return head_ * s_.groups + query / s_.rows; }

  template <int Q> void block(int64_t begin) {
    const float* query[Q];
    int64_t last = 0;
    for (int i = 0; i < Q; ++i) {
      const int64_t row = (begin + i) % s_.rows;
      query[i] = s_.query + text_ * s_.query_strides[0] +
                 head_of(begin + i) * s_.query_strides[1] + row * s_.query_strides[2];
      last = std::max(last, row);
    }
    places_[1].count = s_.slots + s_.first + last + 1;
    const int64_t later = whole(places_[0].count), stride = later + whole(places_[1].count);
    scratch_.resize(Q * (stride + s_.width));
    float *scores = scratch_.data(), *total = scores + Q * stride;
    std::fill(total, total + Q * s_.width, 0.0f);
    score<Q>(query, places_[0], s_.dim, s_.scale, scores, stride);
    score<Q>(query, places_[1], s_.dim, s_.scale, scores + later, stride);
    float most[Q];
    double mass[Q] = {};
    for (int i = 0; i < Q; ++i) {
      hide(begin + i, scores + i * stride + later + s_.slots, last);
      most[i] = largest(scores + i * stride, stride);
    }
    for (const Keys& keys : places_) {
      for (int64_t k = 0; k < keys.count; k += TILE) {
        const int64_t count = std::min(TILE, keys.count - k);
        for (int i = 0; i < Q; ++i) mass[i] += weights(scores + i * stride + k, whole(count), most[i]);
        weigh<Q>(scores + k, stride, keys.value + k * s_.width, count, s_.width, total);
      }
      scores += later;
    }
    for (int i = 0; i < Q; ++i) write(begin + i, total + i * s_.width, mass[i]);
  }

  // Hides later keys after a query, and those that the mask hides from it
  void hide(int64_t query, float* scores, int64_t last) const {
    const int64_t row = query % s_.rows, *strides = s_.visible_strides;
    for (int64_t k = s_.first + row + 1; k <= s_.first + last; ++k) scores[k] = -INFINITY;
    if (!s_.visible) return;
    const bool* visible =
        s_.visible + text_ * strides[0] + head_of(query) * strides[1] + row * strides[2];
    for (int64_t k = 0; k <= s_.first + row; ++k)
      if (!visible[k * strides[3]]) scores[k] = -INFINITY;
  }

  void write(int64_t query, const float* total, double mass) const {
    const int64_t row = text_ * s_.rows + query % s_.rows;
    float* out = s_.output + (row * s_.heads * s_.groups + head_of(query)) * s_.width;
    const double factor = mass == 0 ? 0.0 : 1 / mass;
    for (int64_t d = 0; d < s_.width; ++d) out[d] = static_cast<float>(total[d] * factor);
  }

  const Call& s_;
  const int64_t text_, head_;
  std::vector<float>& scratch_;
  Keys places_[2] = {};
};

}  // namespace

extern "C" void attend(const Call* call) {
  std::atomic<int64_t> next{0};
  const int64_t caches = call->texts * call->heads;
  const auto work = [&] {
    thread_local std::vector<float> scratch;
    for (int64_t cache; (cache = next++) < caches;) Cache(*call, cache, scratch).run();
  };
  std::vector<std::thread> others;
  try {
    while (static_cast<int64_t>(others.size()) + 1 < std::min(call->threads, caches))
      others.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads are allowed: those there are do it
  }
  work();
  for (std::thread& other : others) other.join();
}
