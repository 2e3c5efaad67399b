#!/bin/sh
# Install Chromium without windows, and fonts, for the tests of the page, from Debian's packages, unless it is installed.
set -eu
if command -v chromium-headless-shell >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  echo "The tests of the page need Chromium. Install it, so that the command chromium-headless-shell exists." >&2
  exit 1
fi
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
export DEBIAN_FRONTEND=noninteractive
as_root apt-get update -qq
as_root apt-get install -qq --yes --no-install-recommends chromium-headless-shell \
  fonts-noto-core fonts-noto-color-emoji >/dev/null
