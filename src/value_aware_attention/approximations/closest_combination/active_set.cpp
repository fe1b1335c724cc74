// The closest convex combination of at most r values to an attention output, for many queries of
// one head: the compiled twin of batched.py. One call runs on one thread; Python runs several.
//
// Per query, with o the output and every value measured from it, w_i = v_i - o, the weights that
// bring sum_i beta_i w_i closest to 0 over the simplex are those of a non-negative least squares
// problem, normalised: atoms (w_i, c), target (0, c), for any lift c > 0. It is solved by the
// active-set method of Lawson & Hanson (1974, chapter 23), whose atoms enter one by one as in
// orthogonal matching pursuit (Pati et al., 1993). The atoms in use, as rows A, are kept as their
// orthonormal basis Q = R_inverse A, so that adding or removing one costs O(size (size + dim)) and
// stays accurate in fp32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "../../simd.h"

namespace {

constexpr int TOGETHER = 6;  // queries that share one pass over the values
constexpr int KEY_GROUPS = TILE;  // compiled.py defines TILE; a tile holds a key of each group
constexpr int CANDIDATES = KEY_GROUPS + 1;  // the steepest key of each group, and the mean

enum Search { FAST = 0, DEFAULT = 1, BEST = 2 };

// ---- vectors of 32 bytes; every row is padded with zeros to a multiple of them ----------------

// out[i] = <rows_i, x>
template <class T> void multiply(const T* rows, int count, int stride, const T* x, T* out) {
  using P = Pack<T>;
  int i = 0;
  for (; i + 4 <= count; i += 4, rows += 4 * stride) {
    typename P::type a{}, b{}, c{}, d{};
    for (int n = 0; n < stride; n += P::lanes) {
      const auto y = P::load(x + n);
      a += P::load(rows + n) * y;
      b += P::load(rows + stride + n) * y;
      c += P::load(rows + 2 * stride + n) * y;
      d += P::load(rows + 3 * stride + n) * y;
    }
    out[i] = sum<T>(a);
    out[i + 1] = sum<T>(b);
    out[i + 2] = sum<T>(c);
    out[i + 3] = sum<T>(d);
  }
  for (; i < count; ++i, rows += stride) out[i] = dot(rows, x, stride);
}

// out += sum_i x[i] rows_i
template <class T> void accumulate(const T* rows, int count, int stride, const T* x, T* out) {
  using P = Pack<T>;
  int i = 0;
  for (; i + 4 <= count; i += 4, rows += 4 * stride)
    for (int n = 0; n < stride; n += P::lanes)
      P::store(out + n, P::load(out + n) + x[i] * P::load(rows + n) +
                            x[i + 1] * P::load(rows + stride + n) +
                            (x[i + 2] * P::load(rows + 2 * stride + n) +
                             x[i + 3] * P::load(rows + 3 * stride + n)));
  for (; i < count; ++i, rows += stride)
    for (int n = 0; n < stride; n += P::lanes)
      P::store(out + n, P::load(out + n) + x[i] * P::load(rows + n));
}

// rows_i += x[i] y
template <class T> void outer(T* rows, int count, int stride, const T* x, const T* y) {
  using P = Pack<T>;
  for (int i = 0; i < count; ++i, rows += stride)
    for (int n = 0; n < stride; n += P::lanes)
      P::store(rows + n, P::load(rows + n) + x[i] * P::load(y + n));
}

// dots[q * keys + m] = <residual_q, v_m> for TOGETHER queries and the first `tiles` tiles
template <class T>
void scan(const T* packed, long tiles, int dim, const T* residuals, T* dots, long keys) {
  using P = Pack<T>;
  for (long tile = 0; tile < tiles; ++tile)
    for (int part = 0; part < TILE / P::lanes; part += 2) {
      typename P::type left[TOGETHER] = {}, right[TOGETHER] = {};
      const T* v = packed + tile * dim * TILE + part * P::lanes;
      for (int c = 0; c < dim; ++c, v += TILE) {
        const auto x = P::load(v), y = P::load(v + P::lanes);
#pragma GCC unroll 6
        for (int q = 0; q < TOGETHER; ++q) {
          const T r = residuals[c * TOGETHER + q];
          left[q] += r * x;
          right[q] += r * y;
        }
      }
      T* out = dots + tile * TILE + part * P::lanes;
      for (int q = 0; q < TOGETHER; ++q) {
        P::store(out + q * keys, left[q]);
        P::store(out + q * keys + P::lanes, right[q]);
      }
    }
}

// ---- one call --------------------------------------------------------------------------------

struct Call {               // mirrored by compiled.py
  const void* value;        // (keys, width): centred values, then zeros
  const void* packed;       // (tiles, dim, TILE): the same, padded keys 0
  const void* norms;        // (tiles * TILE): ||v||^2
  const void* output;       // (queries, width): o in column 0..dim, then zeros
  const void* weights;      // (queries, keys): alpha
  const void* zero;         // (queries): the error that counts as none
  const uint8_t* visible;   // (queries, keys), or null
  const void* mean;         // (queries, width): one more candidate of each query; or null
  int64_t keys, tiles;
  int32_t dim, width, r, search, sizes;  // sizes: rows kept per query, 1 or r
  double independence;      // part of an atom's norm
  double wide, smallest;    // see `resolved`; 0: everything is
  int32_t beam, looks;      // sets of a size that "best" extends; see LOOKS in problem.py
  double nearly;            // of the steepest slope: a key worth a closer look
  int64_t* chosen;          // (queries, sizes, r)
  void* mass;               // (queries, sizes, r); of weigh, NaN first where not resolved
  void* error;              // (queries, sizes); NaN first where not resolved
};
static_assert(sizeof(Call) == SIZE_OF_CALL, "compiled.py passes another Call");

template <class T> struct Progress {
  int size, stalled;
  int largest, taken_back;  // the size reached so far; backward steps
  T lift, error;
  T scale, zero;  // largest squared distance of a value from o; the error that counts as none
};

template <class T> struct State : Progress<T> {  // the fields of `_ActiveSets` in batched.py
  T *Q, *R_inverse, *unconstrained, *mass, *lifted, *residual;
  int64_t* keys;
};

template <class T> struct Query {
  long number, tiles;
  bool fresh, resolved, with_mean;
  int64_t nearest;
  const T* output;
  std::vector<T> best;  // error recorded for each size
};

template <class T> struct Child {
  T error;  // if no weight turns negative
  int parent;
  int64_t key;
  uint64_t support;  // a hash of the set of keys
};

inline uint64_t hashed(uint64_t key) {
  key = (key + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  return (key ^ (key >> 29)) * 0x94d049bb133111ebu;
}

template <class T> class Solver {
 public:
  explicit Solver(const Call& call)
      : call_(call),
        value_(static_cast<const T*>(call.value)),
        norms_(static_cast<const T*>(call.norms)),
        output_(static_cast<const T*>(call.output)),
        mean_(static_cast<const T*>(call.mean)),
        width_(call.width),
        capacity_(std::min<long>(std::min(call.r + 1, call.dim + 1), call.keys)),
        stride_(padded(capacity_, Pack<T>::lanes)),
        mean_key_(call.tiles * TILE),
        padded_keys_(call.tiles * TILE + (call.mean ? TILE : 0)),
        states_(call.search == BEST ? TOGETHER + 2 * call.beam : TOGETHER),
        storage_(states_ * state_size() + 8 * (width_ + stride_)),
        keys_(states_ * capacity_),
        state_(states_),
        dots_(TOGETHER * padded_keys_),
        inverse_(TOGETHER * padded_keys_),
        residuals_(TOGETHER * width_) {
    T* next = storage_.data();
    const auto take = [&next](long count) { return (next += count) - count; };
    for (int s = 0; s < states_; ++s) {
      State<T>& state = state_[s];
      state.Q = take(long(capacity_) * width_);
      state.R_inverse = take(long(capacity_) * stride_);
      state.unconstrained = take(stride_);
      state.mass = take(stride_);
      state.lifted = take(width_);
      state.residual = take(width_);
      state.keys = keys_.data() + long(s) * capacity_;
    }
    for (T** each : {&atom_, &row_}) *each = take(width_);
    for (T** each : {&mix_, &again_, &column_, &trial_}) *each = take(stride_);
  }

  // Searches for some queries, TOGETHER at a time; each pass over the values serves all of them.
  void run(long first, long last) {
    std::vector<Query<T>> queries(TOGETHER);
    std::vector<bool> live(TOGETHER, false);
    long next = first;
    while (true) {
      long tiles = 0;
      for (int q = 0; q < TOGETHER; ++q) {
        while (!live[q] && next < last) {
          live[q] = open(queries[q], next++);
          if (live[q]) multiply_next(q, queries[q].output);
        }
        if (live[q]) tiles = std::max(tiles, queries[q].tiles);
      }
      if (tiles == 0) return;
      scan(static_cast<const T*>(call_.packed), tiles, call_.dim, residuals_.data(), dots_.data(),
           padded_keys_);
      for (int q = 0; q < TOGETHER; ++q) {
        if (!live[q]) continue;
        T* dots = dots_.data() + q * padded_keys_;
        live[q] = !advance(queries[q], state_[q], dots, inverse_.data() + q * padded_keys_);
        if (live[q]) multiply_next(q, state_[q].residual);
      }
    }
  }

  // The best weights on the keys named in `chosen`; a repeated or hidden key gets none. The mean is
  // the key `mean_key_`.
  void weigh(long first, long last) {
    std::vector<int64_t> keys;
    for (long query = first; query < last; ++query) {
      int64_t* chosen = call_.chosen + query * call_.r;
      T* mass = static_cast<T*>(call_.mass) + query * call_.r;
      std::fill(mass, mass + call_.r, T(0));
      keys.clear();
      for (int i = 0; i < call_.r; ++i)
        if (sees(query, chosen[i]) && std::find(keys.begin(), keys.end(), chosen[i]) == keys.end())
          keys.push_back(chosen[i]);
      if (keys.empty()) continue;
      State<T>& s = state_[0];
      std::vector<T> distances;
      for (const int64_t key : keys) {
        atom(key, output(query), 0, atom_);
        distances.push_back(dot(atom_, atom_, width_));
      }
      measure_in(s, query, *std::max_element(distances.begin(), distances.end()));
      const T farthest = std::max(s.scale, dot(output(query), output(query), width_));
      if (!resolved(distances.data(), distances.size(), farthest)) {
        mass[0] = std::nan("");
        continue;
      }
      solve_on(s, keys.data(), keys.size(), output(query), std::numeric_limits<T>::infinity());
      for (int i = 0; i < s.size; ++i)
        mass[std::find(chosen, chosen + call_.r, s.keys[i]) - chosen] = s.mass[i];
    }
  }

 private:
  using P = Pack<T>;

  long state_size() const {
    return long(capacity_) * (width_ + stride_) + 2 * stride_ + 2 * width_;
  }
  int lanes() const { return call_.search == BEST ? padded(call_.beam, TOGETHER) : TOGETHER; }
  const T* output(long query) const { return output_ + query * width_; }
  // The value of a key, or the mean that the query of this output may use in place of one.
  const T* vector(int64_t key, const T* output) const {
    return key == mean_key_ ? mean_ + (output - output_) : value_ + key * width_;
  }
  const T* alpha(long query) const {
    return static_cast<const T*>(call_.weights) + query * call_.keys;
  }
  bool sees(long query, long key) const {
    return key == mean_key_ || !call_.visible || call_.visible[query * call_.keys + key];
  }

  static bool near(const State<T>& s) { return s.error <= s.zero; }

  // ---- the active set --------------------------------------------------------------------------

  void atom(int64_t key, const T* output, T lift, T* out) const {
    const T* v = vector(key, output);
    for (int n = 0; n < width_; n += P::lanes)
      P::store(out + n, P::load(v + n) - P::load(output + n));
    out[call_.dim] = lift;
  }

  // The lifted residual is (o - x) up to a factor: the sum of the unconstrained weights.
  void measure(State<T>& s) {
    const T factor = 1 / (1 - s.lifted[call_.dim] / s.lift);
    for (int n = 0; n < width_; n += P::lanes)
      P::store(s.residual + n, P::load(s.lifted + n) * factor);
    s.residual[call_.dim] = 0;
    s.error = dot(s.residual, s.residual, width_);
  }

  void measure_in(State<T>& s, long query, T farthest) const {
    s.scale = std::max(farthest, std::numeric_limits<T>::min());
    s.zero = static_cast<const T*>(call_.zero)[query];
  }

  // Whether T can tell the values apart (`unresolved` in problem.py); infinity: a hidden key.
  bool resolved(const T* distances, long count, T farthest) const {
    if (call_.wide == 0) return true;
    if (farthest < T(call_.smallest)) return false;
    const T limit = farthest * T(call_.wide);
    long close = 0, seen = 0;
    for (long i = 0; i < count; ++i) {
      close += distances[i] < limit;
      seen += distances[i] < std::numeric_limits<T>::infinity();
    }
    return 2 * close <= seen;
  }

  void begin(State<T>& s, int64_t key, const T* output) {
    std::fill(s.unconstrained, s.unconstrained + stride_, T(0));
    std::fill(s.mass, s.mass + stride_, T(0));
    std::fill(s.lifted, s.lifted + width_, T(0));
    std::fill(s.R_inverse, s.R_inverse + stride_, T(0));
    atom(key, output, 0, s.Q);
    const T distance = dot(s.Q, s.Q, width_);
    s.lift = std::sqrt(std::max(distance, T(1e-4) * s.scale));
    s.Q[call_.dim] = s.lift;
    const T inverse = 1 / std::sqrt(distance + s.lift * s.lift);
    for (int n = 0; n < width_; ++n) s.Q[n] *= inverse;
    s.R_inverse[0] = inverse;
    s.keys[0] = key;
    s.mass[0] = 1;
    s.size = s.largest = 1;
    s.taken_back = s.stalled = 0;
    rebuild(s);
  }

  // Unconstrained weights and lifted residual: the projection of (0, lift) on the span of Q.
  void rebuild(State<T>& s) {
    std::fill(s.unconstrained, s.unconstrained + stride_, T(0));
    std::fill(s.lifted, s.lifted + width_, T(0));
    for (int i = 0; i < s.size; ++i) mix_[i] = s.lift * s.Q[long(i) * width_ + call_.dim];
    accumulate(s.R_inverse, s.size, stride_, mix_, s.unconstrained);
    for (int i = 0; i < s.size; ++i) mix_[i] = -mix_[i];
    accumulate(s.Q, s.size, width_, mix_, s.lifted);
    s.lifted[call_.dim] += s.lift;
    measure(s);
  }

  // Adds an atom by Gram-Schmidt; false if it depends on those in use.
  bool insert(State<T>& s, int64_t key, const T* output) {
    atom(key, output, s.lift, atom_);
    const T before = dot(atom_, atom_, width_);
    const auto project = [&](T* out) {
      multiply(s.Q, s.size, width_, atom_, out);
      for (int i = 0; i < s.size; ++i) out[i] = -out[i];
      accumulate(s.Q, s.size, width_, out, atom_);
    };
    project(mix_);
    T after = dot(atom_, atom_, width_);
    if (after < T(0.05) * before) {
      project(again_);
      for (int i = 0; i < s.size; ++i) mix_[i] += again_[i];
      after = dot(atom_, atom_, width_);
    }
    const T length = std::sqrt(after), independence = T(call_.independence);
    if (!(length > independence * std::sqrt(before))) return false;
    const T inverse = 1 / length;
    T* direction = s.Q + long(s.size) * width_;
    T* row = s.R_inverse + long(s.size) * stride_;
    for (int n = 0; n < width_; n += P::lanes)
      P::store(direction + n, P::load(atom_ + n) * inverse);
    for (int i = 0; i < s.size; ++i) mix_[i] *= inverse;
    std::fill(row, row + stride_, T(0));
    accumulate(s.R_inverse, s.size, stride_, mix_, row);
    row[s.size] = inverse;
    const T step = s.lift * direction[call_.dim];
    for (int n = 0; n < stride_; n += P::lanes)
      P::store(s.unconstrained + n, P::load(s.unconstrained + n) + step * P::load(row + n));
    for (int n = 0; n < width_; n += P::lanes)
      P::store(s.lifted + n, P::load(s.lifted + n) - step * P::load(direction + n));
    s.keys[s.size] = key;
    s.mass[s.size] = 0;
    s.largest = std::max(s.largest, ++s.size);
    measure(s);
    return true;
  }

  // Removes an atom: one reflection turns Q so that only its last row needs the atom.
  void drop(State<T>& s, int slot) {
    const int last = s.size - 1;
    T squared = 0;
    for (int i = 0; i < s.size; ++i) {
      column_[i] = s.R_inverse[long(i) * stride_ + slot];
      squared += column_[i] * column_[i];
    }
    const T inverse = 1 / std::sqrt(std::max(squared, std::numeric_limits<T>::min()));
    for (int i = 0; i < s.size; ++i) column_[i] *= inverse;
    column_[last] += column_[last] >= 0 ? 1 : -1;
    T length = 0;
    for (int i = 0; i < s.size; ++i) length += column_[i] * column_[i];
    for (int i = 0; i < s.size; ++i) again_[i] = -2 / length * column_[i];
    std::fill(row_, row_ + width_, T(0));
    accumulate(s.Q, s.size, width_, column_, row_);
    outer(s.Q, last, width_, again_, row_);
    std::fill(trial_, trial_ + stride_, T(0));
    accumulate(s.R_inverse, s.size, stride_, column_, trial_);
    outer(s.R_inverse, last, stride_, again_, trial_);
    for (int i = 0; i < last; ++i) {
      T* row = s.R_inverse + long(i) * stride_;
      row[slot] = slot == last ? T(0) : row[last];
      row[last] = 0;
    }
    s.keys[slot] = s.keys[last];
    s.mass[slot] = s.mass[last];
    s.mass[last] = 0;
    --s.size;
    T total = 0;
    for (int i = 0; i < s.size; ++i) total += s.mass[i];
    if (total > 0)
      for (int i = 0; i < s.size; ++i) s.mass[i] /= total;
    rebuild(s);
  }

  // The inner loop of Lawson & Hanson: walks from the current weights to the unconstrained ones,
  // dropping atoms whose weight reaches zero.
  void restore_feasibility(State<T>& s) {
    while (true) {
      T total = 0, reach = 2;
      int blocking = -1;
      for (int i = 0; i < s.size; ++i) total += s.unconstrained[i];
      for (int i = 0; i < s.size; ++i) {
        const T wanted = s.unconstrained[i] / total;
        if (wanted > 0) continue;
        const T part = s.mass[i] / std::max(s.mass[i] - wanted, std::numeric_limits<T>::min());
        if (!(part < reach)) continue;
        reach = part;
        blocking = i;
      }
      if (blocking < 0 || s.size == 1) {
        for (int i = 0; i < s.size; ++i) s.mass[i] = s.unconstrained[i] / total;
        return;
      }
      for (int i = 0; i < s.size; ++i)
        s.mass[i] = std::max(T(0), s.mass[i] + reach * (s.unconstrained[i] / total - s.mass[i]));
      drop(s, blocking);
    }
  }

  // The atom whose removal costs least, and the error it leaves if none turns negative.
  bool cheapest(const State<T>& s, bool spare_last, int& slot, T& error) {
    std::fill(column_, column_ + stride_, T(0));
    for (int i = 0; i < s.size; ++i) {
      const T* row = s.R_inverse + long(i) * stride_;
      for (int n = 0; n < stride_; n += P::lanes)
        P::store(column_ + n, P::load(column_ + n) + P::load(row + n) * P::load(row + n));
    }
    T least = std::numeric_limits<T>::infinity(), total = 0;
    for (int i = 0; i < s.size; ++i) {
      total += s.unconstrained[i];
      const T cost = s.unconstrained[i] * s.unconstrained[i] / column_[i];
      if (!(cost < least) || (spare_last && i == s.size - 1)) continue;
      least = cost;
      slot = i;
    }
    const T lift = s.lift * s.lift, left = total - least / lift;
    error = lift * (1 / left - 1);
    return left > 0 && error > 0;
  }

  void copy(State<T>& to, const State<T>& from) {
    std::copy(from.Q, from.Q + long(from.size) * width_, to.Q);
    std::copy(from.R_inverse, from.R_inverse + long(from.size) * stride_, to.R_inverse);
    std::copy(from.unconstrained, from.unconstrained + stride_, to.unconstrained);
    std::copy(from.mass, from.mass + stride_, to.mass);
    std::copy(from.lifted, from.lifted + width_, to.lifted);
    std::copy(from.residual, from.residual + width_, to.residual);
    std::copy(from.keys, from.keys + from.size, to.keys);
    static_cast<Progress<T>&>(to) = from;
  }

  // ---- the searches ----------------------------------------------------------------------------

  // What the next pass multiplies all values with, for the query in place q.
  void multiply_next(int q, const T* x) {
    for (int c = 0; c < call_.dim; ++c) residuals_[c * TOGETHER + q] = x[c];
  }

  // What one pass over the values does for a query; true when its last search has ended.
  bool advance(Query<T>& query, State<T>& s, T* dots, T* inverse) {
    bool done;
    if (query.fresh) {
      start(query, s, dots, inverse);
      if (!query.resolved) {
        static_cast<T*>(call_.error)[query.number * call_.sizes] = std::nan("");
        return true;
      }
      done = call_.r == 1 || near(s);
    } else {
      done = step(query, s, dots, inverse);
    }
    if (!done) return false;
    // A search looks one size beyond r: no error left there leaves the sizes asked for open.
    const bool nothing_left = near(s) && s.size <= call_.r && call_.sizes == 1;
    if (call_.search == BEST && call_.r > 1 && !nothing_left) beam(query, s, inverse);
    if (query.with_mean) return true;
    guard(query.number, s);
    return !mean_ || !again_with_mean(query, s, inverse) || call_.r == 1;
  }

  // Begins the search a second time with the mean among the candidates; false if the first left no
  // error. The better result of the two is kept, so the mean never makes an error larger.
  bool again_with_mean(Query<T>& query, State<T>& s, T* inverse) {
    const T error = static_cast<const T*>(call_.error)[query.number * call_.sizes];
    if (call_.sizes == 1 && error <= s.zero) return false;
    atom(query.nearest, query.output, 0, atom_);
    const T least = dot(atom_, atom_, width_);
    atom(mean_key_, query.output, 0, atom_);
    const T distance = dot(atom_, atom_, width_);
    inverse[mean_key_] = 1 / std::sqrt(std::max(distance, T(1e-8) * s.scale));
    query.with_mean = true;
    query.best.assign(call_.r + 2, std::numeric_limits<T>::infinity());
    begin(s, distance < least ? mean_key_ : query.nearest, query.output);
    record(query, s);
    return !near(s);
  }

  // Takes on a query, unless its exact weights are few enough to be the answer.
  bool open(Query<T>& query, long number) {
    const T* weights = alpha(number);
    long end = call_.keys;
    if (call_.visible)
      while (end > 0 && !sees(number, end - 1)) --end;
    const long enough = std::min(call_.r, call_.dim + 1);
    long positive = 0;
    for (long key = 0; key < end && positive <= enough; ++key) positive += weights[key] > 0;
    query.number = number;
    query.output = output(number);
    query.tiles = (end + TILE - 1) / TILE;
    query.fresh = query.resolved = true;
    query.with_mean = false;
    query.best.assign(call_.r + 2, std::numeric_limits<T>::infinity());
    for (int size = 0; size < call_.sizes; ++size)
      write(number, size, nullptr, nullptr, 0, query.best[0]);
    if (positive > enough) return true;
    std::vector<int64_t> keys;
    std::vector<T> mass;
    for (long key = 0; key < end; ++key) {
      if (!(weights[key] > 0)) continue;
      keys.push_back(key);
      mass.push_back(weights[key]);
    }
    const int first = std::max<long>(positive, 1);
    query.best[first] = 0;
    write(number, call_.sizes == 1 ? 0 : first - 1, keys.data(), mass.data(), positive, 0);
    return call_.sizes > 1 && positive > 1;
  }

  // The closest value (Eq. 3): of those whose distances, differences of squares, come within
  // rounding of the least, by the distance itself.
  int64_t nearest(const T* output, const T* distances, long end, T least, T squared) {
    const T slack = 32 * std::numeric_limits<T>::epsilon() * (squared + std::abs(least));
    T closest = std::numeric_limits<T>::infinity();
    int64_t best = 0;
    for (long m = 0; m < end; ++m) {
      if (!(distances[m] <= least + slack)) continue;
      atom(m, output, 0, atom_);
      const T distance = dot(atom_, atom_, width_);
      if (!(distance < closest)) continue;
      closest = distance;
      best = m;
    }
    return best;
  }

  // First pass: the distances of all values, and the closest one (Eq. 3).
  void start(Query<T>& query, State<T>& s, const T* dots, T* inverse) {
    const T* o = query.output;
    const T squared = dot(o, o, width_), infinity = std::numeric_limits<T>::infinity();
    const long end = std::min<long>(call_.keys, query.tiles * TILE);
    for (long m = 0; m < end; ++m) inverse[m] = norms_[m] - 2 * dots[m] + squared;
    std::fill(inverse + end, inverse + padded_keys_, infinity);
    if (call_.visible)
      for (long m = 0; m < end; ++m)
        if (!sees(query.number, m)) inverse[m] = infinity;
    auto least = typename P::type{} + infinity, most = typename P::type{};
    for (long m = 0; m < query.tiles * TILE; m += P::lanes) {
      const auto distance = P::load(inverse + m);
      least = distance < least ? distance : least;
      most = (distance > most) & (distance < infinity) ? distance : most;
    }
    T closest = infinity, farthest = 0;
    for (int lane = 0; lane < P::lanes; ++lane) {
      closest = std::min(closest, T(least[lane]));
      farthest = std::max(farthest, T(most[lane]));
    }
    measure_in(s, query.number, farthest);
    query.resolved = resolved(inverse, end, std::max(farthest, squared));
    query.nearest = nearest(o, inverse, end, closest, squared);
    const T floor = T(1e-8) * s.scale;
    for (long m = 0; m < padded_keys_; ++m)
      inverse[m] = 1 / std::sqrt(inverse[m] > floor ? inverse[m] : floor);
    query.fresh = false;
    begin(s, query.nearest, o);
    record(query, s);
  }

  // The steepest key of each of KEY_GROUPS interleaved groups, and the mean if the query may use it;
  // without any, the slope is 0.
  T shortlist(const State<T>& s, const Query<T>& query, T* dots, const T* inverse) {
    constexpr int PARTS = KEY_GROUPS / P::lanes;
    const auto shift = typename P::type{} + (s.error - dot(s.residual, query.output, width_));
    typename P::type most[PARTS] = {}, where[PARTS] = {};
    for (long first = 0; first < query.tiles * TILE; first += KEY_GROUPS)
      for (int part = 0; part < PARTS; ++part) {
        const long m = first + part * P::lanes;
        const auto slope = (P::load(dots + m) + shift) * P::load(inverse + m);
        const auto more = slope > most[part];
        most[part] = more ? slope : most[part];
        where[part] = more ? typename P::type{} + T(first) : where[part];
      }
    T steepest = 0;
    for (int group = 0; group < KEY_GROUPS; ++group) {
      slope_[group] = most[group / P::lanes][group % P::lanes];
      listed_[group] = long(where[group / P::lanes][group % P::lanes]) + group;
      steepest = std::max(steepest, slope_[group]);
    }
    slope_[KEY_GROUPS] = 0;
    listed_[KEY_GROUPS] = mean_key_;
    if (query.with_mean) {
      dots[mean_key_] = dot(vector(mean_key_, query.output), s.residual, width_);
      slope_[KEY_GROUPS] = std::max(T(0), (dots[mean_key_] + shift[0]) * inverse[mean_key_]);
    }
    return std::max(steepest, slope_[KEY_GROUPS]);
  }

  // How much the sum of unconstrained weights would grow with this key, times lift^2: exact as long
  // as no weight turns negative.
  T gain(const State<T>& s, const Query<T>& query, int64_t key, T descent) {
    atom(key, query.output, s.lift, atom_);
    multiply(s.Q, s.size, width_, atom_, mix_);
    T left = dot(atom_, atom_, width_);
    const T floor = T(1e-4) * left;
    for (int i = 0; i < s.size; ++i) left -= mix_[i] * mix_[i];
    return descent * descent / std::max(left, floor);
  }

  // The key of steepest descent <v - x, o - x> / ||v - o||; searches that try harder take, of the
  // steepest of each group that come near it, the one that would leave the smallest error.
  int64_t pick(const State<T>& s, const Query<T>& query, T* dots, const T* inverse) {
    const T steepest = shortlist(s, query, dots, inverse);
    if (!(steepest > 0)) return -1;
    if (call_.search == FAST)
      return listed_[std::find(slope_, slope_ + CANDIDATES, steepest) - slope_];
    int64_t best = -1;
    T most = 0, least = T(call_.nearly) * steepest;
    const int looks = std::max(2, call_.looks / s.size);
    if (looks < KEY_GROUPS) {  // the larger the set, the more a look costs and the less it matters
      T ordered[CANDIDATES];
      std::copy(slope_, slope_ + CANDIDATES, ordered);
      std::nth_element(ordered, ordered + looks - 1, ordered + CANDIDATES, std::greater<T>());
      least = std::max(least, ordered[looks - 1]);
    }
    for (int lane = 0; lane < CANDIDATES; ++lane) {
      if (slope_[lane] < least) continue;
      const int64_t key = listed_[lane];
      const T now = gain(s, query, key, slope_[lane] / inverse[key]);
      if (!(now > most)) continue;
      most = now;
      best = key;
    }
    return best;
  }

  bool finished(const Query<T>&, const State<T>& s) const {
    const int reach = call_.search == FAST ? call_.r : call_.r + 1;
    return near(s) || s.size >= reach || s.size >= capacity_ || s.stalled >= 3;
  }

  // Backward steps: while giving up an atom beats the best set of that size, give it up. At most as
  // many as the size reached, a bound that does not depend on r: a search for more keys passes
  // through everything that a search for fewer has seen, so more keys never leave a larger error.
  void backward(Query<T>& query, State<T>& s) {
    int slot = 0;
    T error = 0;
    const T resolved = 16 * std::numeric_limits<T>::epsilon() * s.lift * s.lift;
    bool just_added = true;  // the last atom, which the forward step has only now added
    while (s.size >= 3 && s.error > resolved && s.taken_back < s.largest) {
      if (!cheapest(s, just_added, slot, error)) return;
      if (!(error < query.best[s.size - 1] * T(0.999))) return;
      ++s.taken_back;
      drop(s, slot);
      restore_feasibility(s);
      record(query, s);
      just_added = false;
    }
  }

  // One forward step; true when the query is done.
  bool step(Query<T>& query, State<T>& s, T* dots, const T* inverse) {
    const int64_t key = pick(s, query, dots, inverse);
    const T before = s.error;
    if (key < 0) return true;
    const T gap = dots[key] + s.error - dot(s.residual, query.output, width_);
    if (gap <= s.zero || !insert(s, key, query.output)) return true;
    restore_feasibility(s);
    record(query, s);
    s.stalled = s.error > before * T(1 - 1e-4) ? s.stalled + 1 : 0;
    if (call_.search != FAST) backward(query, s);
    return finished(query, s);
  }

  // The ways to extend a state by the steepest key of each group.
  void children(const Query<T>& query, const State<T>& s, int parent, T* dots,
                           const T* inverse) {
    shortlist(s, query, dots, inverse);
    uint64_t support = 0;
    for (int i = 0; i < s.size; ++i) support += hashed(s.keys[i]);
    const T lift = s.lift * s.lift, factor = lift / (lift + s.error);
    for (int lane = 0; lane < CANDIDATES; ++lane) {
      const int64_t key = listed_[lane];
      if (!(slope_[lane] > 0) || slope_[lane] <= s.zero * inverse[key]) continue;
      const T grown = gain(s, query, key, factor * slope_[lane] / inverse[key]) / lift;
      const T missing = std::max(T(0), s.error / (lift + s.error) - grown);
      children_.push_back({lift * missing / (1 - missing), parent, key, support + hashed(key)});
    }
  }

  // Moves the best children of different support to the front; how many there are.
  int survivors(int wanted) {
    std::sort(children_.begin(), children_.end(), [](const Child<T>& a, const Child<T>& b) {
      return a.error != b.error ? a.error < b.error : a.support < b.support;
    });
    int count = 0;
    for (const Child<T>& child : children_) {
      if (count == wanted) break;
      bool known = false;
      for (int i = 0; i < count; ++i) known |= children_[i].support == child.support;
      if (!known) children_[count++] = child;
    }
    return count;
  }

  // Beam search: extends the best sets of every size at once, from the closest values on.
  void beam(Query<T>& query, const State<T>& own, const T* inverse) {
    State<T>*parents = state_.data() + TOGETHER, *next = parents + call_.beam;
    std::vector<int64_t> closest;
    for (long m = 0; m < call_.keys; ++m)
      if (inverse[m] > 0) closest.push_back(m);
    if (query.with_mean) closest.push_back(mean_key_);
    int count = std::min<int>(call_.beam, closest.size());
    std::partial_sort(closest.begin(), closest.begin() + count, closest.end(),
                      [&](int64_t a, int64_t b) {
                        return inverse[a] != inverse[b] ? inverse[a] > inverse[b] : a < b;
                      });
    for (int i = 0; i < count; ++i) {
      parents[i].scale = own.scale;
      parents[i].zero = own.zero;
      begin(parents[i], closest[i], query.output);
    }
    std::vector<T> dots(lanes() * padded_keys_), residuals(TOGETHER * width_);
    for (int size = 2; size <= std::min(call_.r, capacity_) && count > 0; ++size) {
      children_.clear();
      for (int group = 0; group < count; group += TOGETHER) {
        const int members = std::min(TOGETHER, count - group);
        for (int q = 0; q < members; ++q)
          for (int c = 0; c < call_.dim; ++c)
            residuals[c * TOGETHER + q] = parents[group + q].residual[c];
        T* out = dots.data() + group * padded_keys_;
        scan(static_cast<const T*>(call_.packed), query.tiles, call_.dim, residuals.data(), out,
             padded_keys_);
        for (int q = 0; q < members; ++q)
          if (!near(parents[group + q]))
            children(query, parents[group + q], group + q, out + q * padded_keys_, inverse);
      }
      const int wanted = survivors(call_.beam);
      count = 0;
      for (int i = 0; i < wanted; ++i) {
        copy(next[count], parents[children_[i].parent]);
        if (!insert(next[count], children_[i].key, query.output)) continue;
        restore_feasibility(next[count]);
        record(query, next[count++]);
      }
      std::swap(parents, next);
    }
  }

  // ---- the result ------------------------------------------------------------------------------

  void record(Query<T>& query, const State<T>& s) {
    if (s.size > call_.r || !(s.error < query.best[s.size])) return;
    query.best[s.size] = s.error;
    write(query.number, call_.sizes == 1 ? 0 : s.size - 1, s.keys, s.mass, s.size, s.error);
  }

  // Replaces what was kept for a size if this is better; no keys resets it.
  void write(long query, int size, const int64_t* keys, const T* mass, int count,
                        T error) {
    const long row = query * call_.sizes + size;
    T* kept = static_cast<T*>(call_.error) + row;
    if (count > 0 && !(error < *kept)) return;
    *kept = error;
    T* out = static_cast<T*>(call_.mass) + row * call_.r;
    int64_t* chosen = call_.chosen + row * call_.r;
    std::fill(std::copy(mass, mass + count, out), out + call_.r, T(0));
    std::fill(std::copy(keys, keys + count, chosen), chosen + call_.r, int64_t(0));
  }

  // The r visible keys of largest attention weight, heaviest first.
  std::vector<int64_t> heaviest(long query) const {
    const T* weights = alpha(query);
    const auto heavier = [weights](int64_t a, int64_t b) {
      return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    };
    std::vector<int64_t> keys;
    keys.reserve(call_.r + 1);
    T least = 0;
    for (int64_t key = 0; key < call_.keys; ++key) {
      // Most keys come too late to be among the heaviest: look at several at once.
      if (key % 8 == 0)
        while (key + 8 <= call_.keys && std::all_of(weights + key, weights + key + 8,
                                                    [least](T x) { return x <= least; }))
          key += 8;
      if (key == call_.keys) break;
      if (!(weights[key] > least)) continue;
      keys.push_back(key);
      std::push_heap(keys.begin(), keys.end(), heavier);
      if (long(keys.size()) > call_.r) {
        std::pop_heap(keys.begin(), keys.end(), heavier);
        keys.pop_back();
      }
      if (long(keys.size()) == call_.r) least = weights[keys.front()];
    }
    std::sort_heap(keys.begin(), keys.end(), heavier);
    return keys;
  }

  // No search may end above the best weights on the keys that attention itself prefers.
  void guard(long query, State<T>& s) {
    if (call_.r == 1) return;
    const T* errors = static_cast<const T*>(call_.error) + query * call_.sizes;
    std::vector<int64_t> keys;
    T found = std::numeric_limits<T>::infinity();
    for (int row = 0; row < call_.sizes; ++row) {
      found = std::min(found, errors[row]);
      if (found <= s.zero) return;
      if (keys.empty()) keys = heaviest(query);
      const int count = std::min<int>(call_.sizes == 1 ? call_.r : row + 1, keys.size());
      if (separated(keys.data(), count, output(query), alpha(query), found)) continue;
      if (!solve_on(s, keys.data(), count, output(query), found)) continue;
      found = s.error;
      write(query, row, s.keys, s.mass, s.size, found);
    }
  }

  // Whether every combination of the keys lies at least `enough` away: a plane between them and o
  // shows it. It turns, from the mean by attention weight, towards the keys closest to o.
  bool separated(const int64_t* keys, int count, const T* output, const T* weights,
                            T enough) {
    T total = 0;
    for (int i = 0; i < count; ++i) total += weights[keys[i]];
    for (int i = 0; i < count; ++i) again_[i] = weights[keys[i]] / total;
    for (int n = 0; n < width_; n += P::lanes) {
      auto mean = -P::load(output + n);
      for (int i = 0; i < count; ++i) mean += again_[i] * P::load(value_ + keys[i] * width_ + n);
      P::store(row_ + n, mean);
    }
    for (int turn = 0; turn < 6; ++turn) {
      const T squared = dot(row_, row_, width_), offset = dot(row_, output, width_);
      if (squared < enough) return false;
      T nearest = std::numeric_limits<T>::infinity();
      int64_t key = 0;
      for (int i = 0; i < count; ++i) {
        const T depth = dot(value_ + keys[i] * width_, row_, width_) - offset;
        if (!(depth < nearest)) continue;
        nearest = depth;
        key = keys[i];
      }
      if (nearest > 0 && nearest * nearest >= enough * squared) return true;
      atom(key, output, 0, atom_);
      for (int n = 0; n < width_; n += P::lanes)
        P::store(atom_ + n, P::load(atom_ + n) - P::load(row_ + n));
      const T step = std::min(T(1), (squared - nearest) / dot(atom_, atom_, width_));
      for (int n = 0; n < width_; n += P::lanes)
        P::store(row_ + n, P::load(row_ + n) + step * P::load(atom_ + n));
    }
    return false;
  }

  // The best weights on given keys; false as soon as they provably leave an error of `enough`.
  bool solve_on(State<T>& s, const int64_t* keys, int count, const T* output, T enough) {
    std::vector<T> distance(count);
    int closest = 0;
    for (int i = 0; i < count; ++i) {
      atom(keys[i], output, 0, atom_);
      distance[i] = std::max(dot(atom_, atom_, width_), std::numeric_limits<T>::min());
      if (distance[i] < distance[closest]) closest = i;
    }
    begin(s, keys[closest], output);
    for (int turn = 0; turn < 4 * count + 8 && !near(s) && s.size < capacity_; ++turn) {
      const T shift = s.error - dot(s.residual, output, width_);
      T gap = 0, most = 0;
      int best = -1;
      for (int i = 0; i < count; ++i) {
        const T slope = dot(vector(keys[i], output), s.residual, width_) + shift;
        gap = std::max(gap, slope);
        if (!(slope > 0 && slope * slope > most * distance[i])) continue;
        most = slope * slope / distance[i];
        best = i;
      }
      if (gap <= s.zero || best < 0) break;
      const T left = s.error - gap;
      if (left > 0 && left * left >= enough * s.error) return false;
      if (!insert(s, keys[best], output)) break;
      restore_feasibility(s);
    }
    return s.error < enough;
  }

  const Call& call_;
  const T *value_, *norms_, *output_, *mean_;
  const int width_, capacity_, stride_;
  const long mean_key_, padded_keys_;
  const int states_;
  std::vector<T> storage_;
  std::vector<int64_t> keys_;
  std::vector<State<T>> state_;
  std::vector<T> dots_, inverse_, residuals_;
  std::vector<Child<T>> children_;
  T slope_[CANDIDATES];
  int64_t listed_[CANDIDATES];
  T *atom_, *row_, *mix_, *again_, *column_, *trial_;
};

}  // namespace

extern "C" {
void solve_float(const Call* call, int64_t first, int64_t last) {
  Solver<float>(*call).run(first, last);
}
void solve_double(const Call* call, int64_t first, int64_t last) {
  Solver<double>(*call).run(first, last);
}
void weigh_float(const Call* call, int64_t first, int64_t last) {
  Solver<float>(*call).weigh(first, last);
}
void weigh_double(const Call* call, int64_t first, int64_t last) {
  Solver<double>(*call).weigh(first, last);
}
}
