// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Columns are counted in code points: right for the Latin texts that traces carry so far.
#include "excerpt.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

namespace topkey::cli {
namespace {

constexpr int64_t kColumns = 100, kPrefix = 20;
constexpr int64_t kFar = 1024;  // keys back from the query: no sliding window of that size would see these

int64_t width(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

/// One line: every control character a space.
std::string flat(const std::string& token) {
  std::string text = token;
  for (char& c : text) c = static_cast<unsigned char>(c) < ' ' || c == 0x7F ? ' ' : c;
  return text;
}

/// Pieces of one line of text; knows which tokens are marked.
class Line {
 public:
  Line(const std::vector<std::string>& tokens, std::vector<char> marked, bool colour)
      : tokens_(tokens), marked_(std::move(marked)), colour_(colour) {}

  /// Tokens [first, last) around `middle`, below `limit`, that fit `columns`: as much before it as behind, where there
  /// is.
  std::pair<int64_t, int64_t> around(int64_t middle, int64_t columns, int64_t limit) const {
    int64_t first = middle, last = middle + 1;
    bool before = first > 0, behind = last < limit;
    while (before || behind) {
      if (before && width(text(first - 1, last, false)) <= columns)
        --first, before = first > 0;
      else
        before = false;
      if (behind && width(text(first, last + 1, false)) <= columns)
        ++last, behind = last < limit;
      else
        behind = false;
    }
    return {first, last};
  }
  std::string text(int64_t first, int64_t last) const { return text(first, last, colour_); }

 private:
  bool marked(int64_t i) const { return marked_[static_cast<size_t>(i)] != 0; }
  std::string text(int64_t first, int64_t last, bool colour) const {
    std::string line;
    for (int64_t i = first; i < last; ++i) {
      const std::string& plain = tokens_[static_cast<size_t>(i)];
      std::string token = flat(plain);
      if (marked(i) && token.find_first_not_of(' ') == std::string::npos) {
        token = plain.find('\n') != std::string::npos ? "⏎" : "␣";  // a marked blank would not be seen
      }
      if (marked(i) && (i == first || !marked(i - 1))) {
        const size_t blanks = std::min(token.find_first_not_of(' '), token.size());
        token.insert(blanks, colour ? "\033[1m«" : "«");
      }
      if (marked(i) && (i + 1 == last || !marked(i + 1))) token += colour ? "»\033[0m" : "»";
      line += token;
    }
    return line;
  }

  const std::vector<std::string>& tokens_;
  std::vector<char> marked_;
  bool colour_;
};

/// How many chosen positions lie in each sixty-fourth of the window, as bars.
std::string map_of(const std::vector<Chosen>& chosen, const Window& window) {
  static constexpr const char* kBars[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr int64_t kCells = 64;
  std::vector<double> part(kCells, 0);
  const auto cell = [&](int64_t position) {
    return static_cast<size_t>((position - window.start) * kCells / window.size());
  };
  std::vector<int64_t> size(kCells, 0);
  for (int64_t i = window.start; i < window.end; ++i) ++size[cell(i)];
  for (const Chosen& c : chosen) part[cell(c.position)] += 1.0 / static_cast<double>(size[cell(c.position)]);
  std::string bars;
  for (const double x : part) bars += kBars[x == 0 ? 0 : std::clamp<long>(std::lround(x * 8), 1, 8)];
  return bars;
}

using Told = std::vector<std::pair<int64_t, int64_t>>;

/// `pieces` more lines around the best of `chosen`, none twice.
void add_pieces(const Line& line, const std::vector<Chosen>& chosen, int64_t query, int pieces, Told& told,
                std::vector<std::string>& lines) {
  for (const Chosen& c : chosen) {
    const auto covers = [&](const auto& piece) { return piece.first <= c.position && c.position < piece.second; };
    if (pieces == 0 || c.position >= query || std::any_of(told.begin(), told.end(), covers)) continue;
    --pieces;
    told.push_back(line.around(c.position, kColumns - kPrefix, query));
    lines.push_back(
        fmt::format("{:>8.3f}  {:>8}  {}", c.score, c.position, line.text(told.back().first, told.back().second)));
  }
}

}  // namespace

std::vector<Chosen> chosen_by(const support::Call& call, int64_t row, const Window& window) {
  const support::TraceTensor *indices = call.output("indices"), *scores = call.output("scores");
  const int64_t topk = indices->shape[1];
  std::vector<Chosen> chosen;
  for (int64_t i = row * topk; i < (row + 1) * topk; ++i) {
    const int32_t index = indices->as<int32_t>()[i];
    if (index >= 0 && index < window.size()) chosen.push_back({window.start + index, scores->as<float>()[i]});
  }
  std::stable_sort(chosen.begin(), chosen.end(), [](const Chosen& a, const Chosen& b) {
    return a.score > b.score || (a.score == a.score && b.score != b.score);  // NaN last
  });
  return chosen;
}

std::vector<std::string> tokens_of(const support::Trace& trace) {
  const std::string text = trace.text("text", "");
  if (text.empty()) return {};
  try {
    return nlohmann::json::parse(text).get<std::vector<std::string>>();
  } catch (const nlohmann::json::exception&) {
    throw support::TraceError("trace: metadata 'text' must be a JSON array of strings");
  }
}

std::vector<std::string> excerpt(const std::vector<std::string>& tokens, const std::vector<Chosen>& chosen,
                                 const Window& window, int pieces, bool colour) {
  const auto count = static_cast<int64_t>(tokens.size());
  std::vector<char> marked(tokens.size(), 0);
  for (const Chosen& c : chosen) {
    if (c.position < count) marked[static_cast<size_t>(c.position)] = 1;
  }
  const Line line(tokens, marked, colour), plain(tokens, std::vector<char>(tokens.size(), 0), false);
  const int64_t query = std::min(window.end, count);
  std::vector<std::string> lines;
  if (query == 0) return lines;
  lines.push_back(fmt::format("{:>{}}{}", "the query ends  ", kPrefix,
                              plain.text(plain.around(query - 1, kColumns - kPrefix, query).first, query)));
  lines.push_back(fmt::format("{:>{}}|{}|", "chosen keys  ", kPrefix, map_of(chosen, window)));
  lines.push_back(fmt::format("{:>{}}{:<32}{:>34}", "", kPrefix, fmt::format("^ {}", window.start),
                              fmt::format("{} ^", window.end - 1)));
  lines.push_back(fmt::format("{:>8}  {:>8}  {}", "score", "position",
                              "the best of them, in their context (chosen tokens between marks)"));

  Told told;
  add_pieces(line, chosen, query, pieces, told, lines);
  const int64_t far = window.end - kFar;
  if (far <= window.start) return lines;
  std::vector<Chosen> distant;
  std::copy_if(chosen.begin(), chosen.end(), std::back_inserter(distant),
               [&](const Chosen& c) { return c.position < far; });
  lines.push_back(
      fmt::format("{:>{}}the best of the {} that lie more than {} keys back", "", kPrefix, distant.size(), kFar));
  add_pieces(line, distant, query, pieces, told, lines);
  return lines;
}

}  // namespace topkey::cli
