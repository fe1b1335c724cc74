// Drops keys one by one, each time the one whose loss costs the joint error of the rest least: the
// compiled twin of `in_torch` in drops.py. joint_set.py derives the formulas.
//
// A drop touches each pair of a row and a followed key with some ten operations, fewer than it
// takes to start one operation of a tensor library.

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int64_t TOGETHER = 16;  // rows summed in their own precision before fp64

struct Call {
  const void* value;   // (C, K, V) for C = caches * parts
  void* weights;       // (C, n, K)
  void *mass, *error;  // (C, n)
  const void* others;  // (C, n)
  void* to_kept;       // (C, n, K)
  const void* to_exact;
  double* fixed;    // (B, K)
  int64_t* places;  // (B, count)
  double* costs;
  int64_t caches, parts, rows, keys, width, count, is_fresh;
  double left;
};

static_assert(sizeof(Call) == SIZE_OF_CALL, "drops.py lays it out otherwise");

template <class T> class Drops {
 public:
  explicit Drops(const Call& call)
      : s_(call), cost_(call.caches * call.keys), between_(call.keys), sums_(call.keys) {}

  int64_t run() {
    std::vector<int64_t> cheapest(s_.caches);
    for (int64_t b = 0; b < s_.caches; ++b) measure(b, -1);
    for (int64_t step = 0; step < s_.count; ++step) {
      bool empties = false;
      for (int64_t b = 0; b < s_.caches; ++b) {
        cheapest[b] = smallest(&cost_[b * s_.keys]);
        empties = empties || is_emptied(b, cheapest[b]);
      }
      if (empties && (step > 0 || !s_.is_fresh)) return step;
      for (int64_t b = 0; b < s_.caches; ++b) {
        s_.places[b * s_.count + step] = cheapest[b];
        s_.costs[b * s_.count + step] = cost_[b * s_.keys + cheapest[b]];
        s_.fixed[b * s_.keys + cheapest[b]] = std::numeric_limits<double>::infinity();
        if (!empties && step + 1 < s_.count) measure(b, cheapest[b]);
      }
      if (empties) return step + 1;
    }
    return s_.count;
  }

 private:
  // As torch's min: the first of the smallest, and NaN before any number.
  int64_t smallest(const double* cost) const {
    int64_t best = 0;
    for (int64_t k = 1; k < s_.keys; ++k)
      if (cost[k] < cost[best] || (std::isnan(cost[k]) && !std::isnan(cost[best]))) best = k;
    return best;
  }

  bool is_emptied(int64_t b, int64_t key) const {
    const T* mass = static_cast<const T*>(s_.mass);
    const T* weights = static_cast<const T*>(s_.weights);
    for (int64_t i = b * s_.parts * s_.rows; i < (b + 1) * s_.parts * s_.rows; ++i)
      if (mass[i] > 0 && mass[i] - weights[i * s_.keys + key] < T(s_.left)) return true;
    return false;
  }

  // Drops a key, unless it is -1, and computes what dropping each of the others would cost.
  void measure(int64_t b, int64_t dropped) {
    const int64_t keys = s_.keys;
    double* cost = &cost_[b * keys];
    for (int64_t k = 0; k < keys; ++k) cost[k] = s_.fixed[b * keys + k];
    for (int64_t c = b * s_.parts; c < (b + 1) * s_.parts; ++c) {
      if (dropped >= 0) measure_distances(c, dropped);
      for (int64_t first = 0; first < s_.rows; first += TOGETHER) {
        const int64_t last = first + TOGETHER < s_.rows ? first + TOGETHER : s_.rows;
        for (int64_t k = 0; k < keys; ++k) sums_[k] = 0;
        for (int64_t i = c * s_.rows + first; i < c * s_.rows + last; ++i) {
          if (dropped >= 0) drop(i, dropped);
          add_costs(i);
        }
        for (int64_t k = 0; k < keys; ++k) cost[k] += sums_[k];
      }
    }
  }

  void measure_distances(int64_t c, int64_t dropped) {
    const T* value = static_cast<const T*>(s_.value) + c * s_.keys * s_.width;
    for (int64_t k = 0; k < s_.keys; ++k) {
      T sum = 0;
      for (int64_t d = 0; d < s_.width; ++d) {
        const T apart = value[k * s_.width + d] - value[dropped * s_.width + d];
        sum += apart * apart;
      }
      between_[k] = sum;
    }
  }

  void drop(int64_t row, int64_t key) {
    T* weights = static_cast<T*>(s_.weights) + row * s_.keys;
    T* __restrict near = static_cast<T*>(s_.to_kept) + row * s_.keys;
    const T far = static_cast<const T*>(s_.to_exact)[row * s_.keys + key];
    T& mass = static_cast<T*>(s_.mass)[row];
    T& error = static_cast<T*>(s_.error)[row];
    const T* __restrict between = between_.data();
    const T left = mass - weights[key];
    const T t = left > 0 ? weights[key] / left : T(0);  // 0 / 0 in a row that sees nothing
    const T spread = (1 + t) * t * near[key];
    error += t * ((1 + t) * near[key] - far + error);
    mass = left;
    weights[key] = 0;
    for (int64_t k = 0; k < s_.keys; ++k) near[k] = (1 + t) * near[k] + spread - t * between[k];
  }

  void add_costs(int64_t row) {
    const T* __restrict weights = static_cast<const T*>(s_.weights) + row * s_.keys;
    const T* __restrict near = static_cast<const T*>(s_.to_kept) + row * s_.keys;
    const T* __restrict far = static_cast<const T*>(s_.to_exact) + row * s_.keys;
    T* __restrict sums = sums_.data();
    const T mass = static_cast<const T*>(s_.mass)[row];
    const T error = static_cast<const T*>(s_.error)[row];
    const T lost = static_cast<const T*>(s_.others)[row] - error;
    const T least = T(s_.left) * mass;
    for (int64_t k = 0; k < s_.keys; ++k) {
      const T rest = mass - weights[k];
      const bool is_largest = rest <= least;  // all of a row that sees nothing
      const T t = (is_largest ? T(0) : weights[k]) / (is_largest ? T(1) : rest);
      const T change = t * ((1 + t) * near[k] - far[k] + error);
      sums[k] += is_largest ? lost : change;
    }
  }

  const Call& s_;
  std::vector<double> cost_;
  std::vector<T> between_, sums_;
};

}  // namespace

extern "C" {
int64_t drop_float(const Call* call) { return Drops<float>(*call).run(); }
int64_t drop_double(const Call* call) { return Drops<double>(*call).run(); }
}
