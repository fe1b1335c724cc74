// The losses from dropping each key of one cache alone, and the outputs of its queries: the compiled
// twin of batched_losses.py, which derives the formulas. One call runs on one thread.
//
// Weights are never stored for all queries. A block of queries holds its own in the L2 cache from
// the scores, through exp and u, to the sums over the block. The three products of attention's size
// share one micro-kernel, whose sums stay in registers.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../simd.h"

namespace {

#ifdef __AVX512F__
constexpr int BYTES = 64, TILE_ROWS = 12;
#else
constexpr int BYTES = 32, TILE_ROWS = 6;
#endif
using P = Pack<float, BYTES>;
typedef P::type Vec;
typedef int32_t Bits __attribute__((vector_size(BYTES)));
constexpr int LANES = P::lanes, TILE = 2 * LANES;
constexpr int64_t DEPTH = 256;             // values of a tile that L1 holds
constexpr int64_t STRIP = 2 * TILE_ROWS;   // keys whose weights L1 holds
constexpr int64_t EXPONENTIAL = -1;        // else the exponent of a product of vectors
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float TINY = std::numeric_limits<float>::min();

struct Call {             // mirrored by compiled_losses.py
  const float* query;     // (groups, rows, dim), scaled
  const float* key;       // (tiles, dim, TILE), zeros after the last key
  const float* value;     // (padded, width): centred values in a unit, then zeros
  const float* columns;   // (width / TILE, padded, TILE): the same
  const float* centre;    // (width): the mean value in this unit
  const float* metric;    // (groups, width, width), or null for the identity
  const float* beside;    // (groups, rows, value_dim): sums of values beside, or null
  const float* mass;      // (groups, rows): the mass that divides them
  const float* log_scale; // (groups, rows): log of the unit of both
  const uint8_t* visible; // (groups, rows, keys) by its strides, or null
  float* output;          // (groups, rows, value_dim)
  double* loss;           // (keys)
  int64_t groups, rows, dim, keys, padded, value_dim, width, block, degree;
  int64_t group_stride, row_stride;
  double unit;
};

static_assert(sizeof(Call) == SIZE_OF_CALL, "compiled_losses.py lays it out otherwise");

inline Vec all(float x) { return P::all(x); }

inline Vec larger(Vec x, Vec y) { return y > x ? y : x; }

// out (M x TILE) = or += sum_k a[i * row + k * step] b[k * b_step ...]
template <int M, bool ADDS>
void tile(int64_t depth, const float* a, int64_t row, int64_t step, const float* b, int64_t b_step,
          float* out, int64_t out_row) {
  Vec sums[M][2];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < 2; ++j) sums[i][j] = ADDS ? P::load(out + i * out_row + j * LANES) : Vec{};
  for (int64_t k = 0; k < depth; ++k, a += step, b += b_step) {
    const Vec left = P::load(b), right = P::load(b + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < M; ++i) {
      const Vec x = all(a[i * row]);
      sums[i][0] += x * left;
      sums[i][1] += x * right;
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < 2; ++j) P::store(out + i * out_row + j * LANES, sums[i][j]);
}

// The same for any number of rows.
template <bool ADDS>
void tiles(int64_t rows, int64_t depth, const float* a, int64_t row, int64_t step, const float* b,
           int64_t b_step, float* out, int64_t out_row) {
  for (; rows >= TILE_ROWS; rows -= TILE_ROWS, a += TILE_ROWS * row, out += TILE_ROWS * out_row)
    tile<TILE_ROWS, ADDS>(depth, a, row, step, b, b_step, out, out_row);
  for (; rows >= 3; rows -= 3, a += 3 * row, out += 3 * out_row)
    tile<3, ADDS>(depth, a, row, step, b, b_step, out, out_row);
  for (; rows > 0; --rows, a += row, out += out_row)
    tile<1, ADDS>(depth, a, row, step, b, b_step, out, out_row);
}

class Losses {
 public:
  explicit Losses(const Call& call)
      : c_(call), stride_(call.padded + TILE),  // a power of two would share few sets of L1
        scores_(call.block * stride_), sums_(call.padded * call.width), weight_(call.padded),
        squares_(call.padded), of_largest_(call.padded), outputs_(call.block * call.width),
        turned_(call.block * call.width), packed_(call.block * call.width),
        gaps_(call.block * call.width), total_(call.block),
        others_(call.block), of_top_(call.block), mass_(call.block), lengths_(call.block),
        top_(call.block) {}

  void run() {
    std::fill(c_.loss, c_.loss + c_.keys, 0.0);
    for (int64_t group = 0; group < c_.groups; ++group) {
      metric_ = c_.metric ? c_.metric + group * c_.width * c_.width : nullptr;
      for (auto* sums : {&sums_, &weight_, &squares_, &of_largest_})
        std::fill(sums->begin(), sums->end(), 0.0f);
      for (int64_t first = 0; first < c_.rows; first += c_.block) {
        first_ = group * c_.rows + first;
        rows_ = std::min(c_.block, c_.rows - first);
        score(group, first);
        for (int64_t r = 0; r < rows_; ++r) weigh(r);
        attend();
        drop_largest();
        drop_others();
      }
      finish();
    }
  }

 private:
  float* scores(int64_t r) { return scores_.data() + r * stride_; }

  void score(int64_t group, int64_t first) {
    const float* query = c_.query + first_ * c_.dim;
    for (int64_t j = 0; j < c_.padded; j += TILE)
      tiles<false>(rows_, c_.dim, query, c_.dim, 1, c_.key + j * c_.dim, TILE, scores(0) + j,
                   stride_);
    const float hidden = c_.degree == EXPONENTIAL ? -INFINITE : 0.0f;
    for (int64_t r = 0; r < rows_; ++r) {
      float* x = scores(r);
      if (c_.degree != EXPONENTIAL)
        for (int64_t j = 0; j < c_.keys; ++j) x[j] = std::max(std::fabs(x[j]), TINY);
      std::fill(x + c_.keys, x + c_.padded, hidden);
      if (!c_.visible) continue;
      const uint8_t* visible = c_.visible + group * c_.group_stride + (first + r) * c_.row_stride;
      for (int64_t j = 0; j < c_.keys; ++j) x[j] = visible[j] ? x[j] : hidden;
    }
  }

  // Finds the key of the largest weight and makes weights of the scores; its own becomes 0.
  void weigh(int64_t r) {
    float* x = scores(r);
    const int64_t top = top_[r] = largest(x);
    float log_top = x[top];
    if (c_.degree != EXPONENTIAL)
      log_top = log_top > 0 ? c_.degree * std::log(log_top) : -INFINITE;
    const float beside =
        c_.beside ? std::log(c_.mass[first_ + r]) + c_.log_scale[first_ + r] : -INFINITE;
    float scale = std::max(log_top, beside);
    if (scale == -INFINITE) scale = 0.0f;
    of_top_[r] = std::exp(log_top - scale);
    mass_[r] = std::exp(beside - scale);
    others_[r] = mass_[r] + (c_.degree == EXPONENTIAL ? exponentials(x, top, scale)
                                                      : powers(x, top, of_top_[r]));
    total_[r] = others_[r] + of_top_[r];
    if (total_[r] == 0) total_[r] = 1.0f;
  }

  int64_t largest(const float* x) const {
    Vec left = P::load(x), right = P::load(x + LANES);
    for (int64_t j = TILE; j < c_.padded; j += TILE) {
      left = larger(left, P::load(x + j));
      right = larger(right, P::load(x + j + LANES));
    }
    left = larger(left, right);
    float most = left[0];
    for (int i = 1; i < LANES; ++i) most = std::max(most, left[i]);
    for (int64_t j = 0; j < c_.padded; j += TILE) {
      const Bits is_most = (P::load(x + j) == all(most)) | (P::load(x + j + LANES) == all(most));
      int32_t any = 0;
      for (int i = 0; i < LANES; ++i) any |= is_most[i];
      for (int64_t i = j; any && i < j + TILE; ++i)
        if (x[i] == most) return i;
    }
    return 0;  // NaN
  }

  float exponentials(float* x, int64_t top, float scale) {
    x[top] = -INFINITE;
    const Vec shift = all(scale);
    Vec left{}, right{};
    for (int64_t j = 0; j < c_.padded; j += TILE) {
      const Vec first = exponential<BYTES>(P::load(x + j) - shift);
      const Vec second = exponential<BYTES>(P::load(x + j + LANES) - shift);
      P::store(x + j, first), P::store(x + j + LANES, second);
      left += first, right += second;
    }
    return sum<float, BYTES>(left + right);
  }

  // Powers relative to the largest number, so that none overflows; 0 for a hidden key.
  float powers(float* x, int64_t top, float of_top) {
    const float most = x[top] > 0 ? x[top] : 1.0f;
    float others = 0.0f;
    x[top] = 0.0f;
    for (int64_t j = 0; j < c_.keys; ++j) {
      float power = x[j] > 0 ? of_top : 0.0f;
      for (int64_t d = 0; d < c_.degree; ++d) power *= x[j] / most;
      x[j] = power;
      others += power;
    }
    return others;
  }

  // Computes the outputs, and how far each is from that without its key of the largest weight.
  void attend() {
    std::fill(outputs_.begin(), outputs_.begin() + rows_ * c_.width, 0.0f);
    for (int64_t j = 0; j < c_.padded; j += DEPTH)
      for (int64_t t = 0; t < c_.width; t += TILE)
        tiles<true>(rows_, std::min(DEPTH, c_.padded - j), scores(0) + j, stride_, 1,
                    c_.columns + t * c_.padded + j * TILE, TILE, &outputs_[t], c_.width);
    const float unit = c_.unit;
    for (int64_t r = 0; r < rows_; ++r) {
      float *out = &outputs_[r * c_.width], *gap = &gaps_[r * c_.width];
      const float* top = c_.value + top_[r] * c_.width;
      if (mass_[r] > 0) {
        const float* beside = c_.beside + (first_ + r) * c_.value_dim;
        const float per_mass = 1.0f / c_.mass[first_ + r], per_unit = 1.0f / unit;
        for (int64_t d = 0; d < c_.value_dim; ++d)
          out[d] += mass_[r] * (beside[d] * per_mass * per_unit - c_.centre[d]);
      }
      // Without other keys, or without any, an output is 0, which is -centre here.
      const float per_others = others_[r] > 0 ? 1.0f / others_[r] : 0.0f;
      const float without_others = others_[r] > 0 ? 0.0f : 1.0f;
      const float without_keys = without_others * (of_top_[r] > 0 ? 0.0f : 1.0f);
      const float of_top = of_top_[r], per_total = 1.0f / total_[r];
      for (int64_t d = 0; d < c_.width; ++d) {
        const float centre = c_.centre[d];
        gap[d] = out[d] * per_others - without_others * centre - top[d];
        out[d] = (out[d] + of_top * top[d]) * per_total - without_keys * centre;
      }
      float* output = c_.output + (first_ + r) * c_.value_dim;
      for (int64_t d = 0; d < c_.value_dim; ++d) output[d] = (out[d] + c_.centre[d]) * unit;
    }
  }

  void drop_largest() {
    measure(gaps_.data(), rows_);
    for (int64_t r = 0; r < rows_; ++r) {
      const float share = of_top_[r] / total_[r];
      of_largest_[top_[r]] += share * share * lengths_[r];
    }
  }

  // Adds u, u ||o||^2 and u o of the block to the sums of all other keys.
  void drop_others() {
    const float* turned = measure(outputs_.data(), rows_);
    for (int64_t t = 0; t < c_.width; t += TILE)
      for (int64_t r = 0; r < rows_; ++r)
        std::memcpy(&packed_[t * rows_ + r * TILE], turned + r * c_.width + t,
                    TILE * sizeof(float));
    int64_t r = 0;
    for (; r + 4 <= rows_; r += 4) square<4>(r);
    for (; r < rows_; ++r) square<1>(r);
    for (int64_t j = 0; j < c_.padded; j += STRIP)
      for (int64_t t = 0; t < c_.width; t += TILE)
        tiles<true>(std::min(STRIP, c_.padded - j), rows_, scores(0) + j, 1, stride_,
                    &packed_[t * rows_], TILE, &sums_[j * c_.width + t], c_.width);
  }

  // Makes u of the weights of N rows, whose sums are read and written once.
  template <int N> void square(int64_t first) {
    float* x = scores(first);
    Vec total[N], length[N];
    for (int i = 0; i < N; ++i)
      total[i] = all(total_[first + i]), length[i] = all(lengths_[first + i]);
    for (int64_t j = 0; j < c_.padded; j += LANES) {
      Vec weight = P::load(&weight_[j]), squares = P::load(&squares_[j]);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const Vec p = P::load(x + i * stride_ + j), t = p / (total[i] - p), u = t * t;
        P::store(x + i * stride_ + j, u);
        weight += u, squares += u * length[i];
      }
      P::store(&weight_[j], weight), P::store(&squares_[j], squares);
    }
  }

  // Computes x metric, which it returns, and the lengths x metric x of some rows.
  const float* measure(const float* x, int64_t rows) {
    const float* turned = x;
    if (metric_) {
      for (int64_t t = 0; t < c_.width; t += TILE)
        tiles<false>(rows, c_.width, x, c_.width, 1, metric_ + t, c_.width, &turned_[t], c_.width);
      turned = turned_.data();
    }
    for (int64_t r = 0; r < rows; ++r)
      lengths_[r] = along(x + r * c_.width, turned + r * c_.width);
    return turned;
  }

  float along(const float* x, const float* y) const {
    Vec sums{};
    for (int64_t d = 0; d < c_.width; d += LANES) sums += P::load(x + d) * P::load(y + d);
    return sum<float, BYTES>(sums);
  }

  void finish() {
    for (int64_t first = 0; first < c_.keys; first += c_.block) {
      const float* value = c_.value + first * c_.width;
      const int64_t keys = std::min(c_.block, c_.keys - first);
      measure(value, keys);
      for (int64_t k = 0, j = first; k < keys; ++k, ++j) {
        const float with_output = along(value + k * c_.width, &sums_[j * c_.width]);
        const float of_others = lengths_[k] * weight_[j] + squares_[j] - 2 * with_output;
        c_.loss[j] += (of_others < 0 ? 0.0f : of_others) + of_largest_[j];
      }
    }
  }

  const Call& c_;
  const int64_t stride_;
  std::vector<float> scores_, sums_, weight_, squares_, of_largest_;
  std::vector<float> outputs_, turned_, packed_, gaps_;
  std::vector<float> total_, others_, of_top_, mass_, lengths_;
  std::vector<int64_t> top_;
  const float* metric_ = nullptr;
  int64_t first_ = 0, rows_ = 0;  // of the block, the first among the rows of all groups
};

}  // namespace

extern "C" int64_t tile_width() { return TILE; }

extern "C" void single_losses(const Call* call) { Losses(*call).run(); }
