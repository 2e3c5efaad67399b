import js from "@eslint/js";
import globals from "globals";

const rules = {
  ...js.configs.recommended.rules,
  "no-unused-vars": "error",
  "eqeqeq": "error",
  "prefer-const": "error",
  "no-var": "error",
};

export default [
  {files: ["src/headwise/page/script/*.js"], languageOptions: {ecmaVersion: 2022, sourceType: "module", globals: globals.browser}, rules},
  {files: ["tests/page/script/*.js"], languageOptions: {ecmaVersion: 2022, sourceType: "module", globals: globals.node}, rules},
];
