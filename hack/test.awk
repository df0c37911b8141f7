# Sums up the output of `cargo test -- --show-output`; called by test.sh. Lines go through as they come, but of the output of
# passing tests only "skipped: ..." is shown, with the test's name.
function show(line) { print line; fflush() }

/^successes:$/                     { quiet = 1; next }
/^failures:$/ || /^test result: /  { quiet = 0 }
/^---- .* stdout ----$/            { name = $2 }
quiet && /^skipped: /              { show(name " " $0); if (!(name in skips)) skips[name]; }
quiet                              { next }

/^test result: / {
  for (i = 2; i <= NF; i++) {
    if ($i ~ /^passed/)  passed  += $(i - 1)
    if ($i ~ /^failed/)  failed  += $(i - 1)
    if ($i ~ /^ignored/) ignored += $(i - 1)
  }
  for (name in skips) { skipped++; delete skips[name] }
}
{ show($0) }

END { printf "%d passed, %d failed, %d skipped\n", passed - skipped, failed, skipped + ignored }
